// Asks again and again, but not while nobody looks.

const LONGEST_MS = 15_000;

/**
 * Call `work` every `every` milliseconds, counted from its end, while the page is visible; after a failure less and less often.
 * @param {() => Promise<void>} work
 * @param {{every: number, failed?: (error: Error) => void}} options
 * @returns {{stop: () => void, now: () => void}} `now`: do not wait for the next time.
 */
export function poll(work, { every, failed = () => {} }) {
  let timer = 0;
  let failures = 0;
  let going = false;
  let again = false;
  let stopped = false;

  async function turn() {
    clearTimeout(timer);
    if (stopped || document.hidden) return;
    if (going) {
      again = true;
      return;
    }
    going = true;
    again = false;
    try {
      await work();
      failures = 0;
    } catch (error) {
      failures += 1;
      if (!stopped) failed(error);
    }
    going = false;
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
