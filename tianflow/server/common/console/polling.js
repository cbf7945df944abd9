// Polls while the page is visible.

const LONGEST_MS = 15_000;

/**
 * Call `work` every `every` milliseconds, counted from its end, while the page is visible. Failures double the interval.
 * @param {() => Promise<void>} work
 * @param {{every: number, failed?: (error: Error) => void}} options
 * @returns {{stop: () => void, now: () => void}} `now`: poll at once.
 */
export function poll(work, { every, failed = () => {} }) {
  let timer = 0;
  let failures = 0;
  let running = false;
  let again = false;
  let stopped = false;

  async function turn() {
    clearTimeout(timer);
    if (stopped || document.hidden) return;
    if (running) {
      again = true;
      return;
    }
    running = true;
    again = false;
    try {
      await work();
      failures = 0;
    } catch (error) {
      failures += 1;
      if (!stopped) failed(error);
    }
    running = false;
    if (stopped) return;
    clearTimeout(timer);
    timer = setTimeout(turn, again && failures === 0 ? 0 : Math.min(LONGEST_MS, every * 2 ** Math.min(failures, 10)));
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return {
    now: turn,
    stop() {
      stopped = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", turn);
    },
  };
}
