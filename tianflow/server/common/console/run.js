// View of one run: its document, polled once a second, with settings and actions.

import { Actions } from "./actions.js";
import { ask, runPath } from "./api.js";
import { AuditPanel, labelOf } from "./audit.js";
import { ConfigPanel } from "./config.js";
import { DiagnosisPanel } from "./diagnosis.js";
import { h, setText, show } from "./dom.js";
import { EndPanel } from "./ending.js";
import { LogPanel } from "./log.js";
import { MOST_ROWS, Panels } from "./panels.js";
import { poll } from "./polling.js";
import { resultsOf, targetMet } from "./results.js";
import { Rows } from "./rows.js";
import { duration, number, whole } from "./scales.js";
import { SettingsPanel } from "./settings.js";
import { StalenessPanel } from "./staleness.js";
import { capital, ENDED, stateClass } from "./words.js";

const EVERY_MS = 1000;
const INACTIVE_MS = 4000;
const RANGES = [
  ["5 min", 300],
  ["1 h", 3600],
  ["all", 0],
];
const FACTS = ["elapsed", "steps", "episodes", "updates", "steps/s", "return", "evaluation", "left"];

/** States after which a server that cannot be reached has ended. */
const LEADS_TO_END = ["stopping", "draining", ...ENDED];

/** The page of the run `id`. `service`: whether the server also has ended runs. */
export class RunView {
  constructor(id, { service, status }) {
    Object.assign(this, { id, service, status });
    this.rows = new Rows();
    this.audit = [];
    this.seen = {};
    this.polled = 0;
    this.range = 0;
    this.settings = new SettingsPanel(id);
    this.actions = new Actions(id, (state) => this.acted(state));
    this.staleness = new StalenessPanel({ change: (bound) => this.settings.put("balance.max_staleness", bound) });
    this.diagnosis = new DiagnosisPanel({
      hasField: (path) => this.settings.hasField(path),
      use: (path, value) => this.settings.use(path, value),
    });
    this.auditPanel = new AuditPanel();
    this.config = new ConfigPanel(id);
    this.log = new LogPanel(id);
    this.outcome = new EndPanel();
    this.components = h("tbody");
    this.node = this.build();
    this.polling = poll(() => this.update(), { every: EVERY_MS, failed: (error) => this.lost(error) });
  }

  close() {
    this.polling.stop();
    this.staleness.close();
    this.panels.close();
  }

  build() {
    const grid = h("div", { class: "charts" });
    this.panels = new Panels(grid);
    this.grid = grid;
    this.ranges = this.chooser();
    this.table = this.componentsTable();
    const main = h("div", { class: "main" }, this.outcome.node, this.staleness.node, this.diagnosis.node, this.ranges, grid);
    show(this.log.node, this.service);
    const after = h("div", { class: "after" }, this.config.node, this.auditPanel.node, this.table, this.log.node);
    return h("div", { class: "run" }, this.head(), h("div", { class: "columns" }, main, h("aside", {}, this.settings.node), after));
  }

  head() {
    this.state = h("span", { class: "state" }, "…");
    this.lead = h("p", { class: "lead" }, "\u00a0");
    this.reasons = h("p", { class: "reasons", hidden: true });
    this.onDisk = h("p", { class: "hint", id: "on-disk", hidden: true });
    this.facts = Object.fromEntries(FACTS.map((name) => [name, h("dd", {}, "–")]));
    this.names = Object.fromEntries(FACTS.map((name) => [name, h("dt", {}, name)]));
    this.strip = h("dl", { class: "strip" }, ...FACTS.map((name) => h("div", {}, this.names[name], this.facts[name])));
    const title = h("div", {}, h("h1", {}, this.id, " ", this.state), this.lead, this.reasons, this.onDisk);
    return h("header", { class: "head" }, h("div", { class: "title" }, title, this.actions.node), this.strip);
  }

  chooser() {
    const options = RANGES.map(([name, seconds]) => {
      const input = h("input", { type: "radio", name: "range", value: seconds, checked: seconds === this.range });
      input.addEventListener("change", () => {
        this.range = seconds;
        this.paint();
      });
      return h("label", {}, input, h("span", {}, name));
    });
    return h("fieldset", { class: "ranges" }, h("legend", {}, "Time range of the charts"), ...options);
  }

  componentsTable() {
    const names = ["Component", "Role", "Process", "State", "Settings"];
    const table = h("table", {}, h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))), this.components);
    const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Components" }, table);
    return h("details", { class: "card", id: "components" }, h("summary", {}, "Components"), scroll);
  }

  // Polling ---------------------------------------------------------------------------------------------------------

  async update() {
    if (this.run && !this.run.progress && performance.now() - this.polled < INACTIVE_MS) return;
    const { data: run } = await ask(runPath(this.id));
    this.polled = performance.now();
    this.status.live();
    if (run.progress) await this.live(run);
    else await this.inactive(run);
    this.run = run;
    this.paint();
  }

  async live(run) {
    if (this.rows.breaks(run)) await this.loadHistory(run);
    else this.rows.add(run);
    await this.followAudit(`${run.settings?.generation} ${run.state}`);
    const sections = await this.config.follow(run.settings?.generation);
    await this.settings.follow(run.settings?.generation, sections);
    this.settings.showSchedules(run.settings?.schedules);
  }

  async inactive(run) {
    if (this.run?.state !== run.state || (run.on_disk && run.state === "running")) await this.loadHistory(run);
    await this.followAudit(run.state);
    await this.config.follow(run.state);
    if (this.run?.state !== run.state && ENDED.includes(run.state)) {
      this.config.node.open = matchMedia("(min-width: 721px)").matches;
      this.outcome.node.after(this.log.node);
      if (run.state === "failed") this.log.node.open = true;
    }
  }

  async loadHistory(run) {
    try {
      this.rows.begin((await ask(runPath(this.id, `/history?points=${MOST_ROWS}`))).data, run);
    } catch (error) {
      if (error.status === 401 || error.status === 0) throw error;
      this.rows.begin(null, run); // without a history of the server, charts start now
    }
  }

  async followAudit(key) {
    const now = performance.now();
    if (this.seen.key === key && now - this.seen.at < 10_000) return;
    this.seen = { key, at: now };
    try {
      this.audit = (await ask(runPath(this.id, "/audit"))).data?.audit ?? [];
    } catch (error) {
      if (error.status === 401) throw error;
      return;
    }
    this.auditPanel.draw(this.audit);
  }

  acted(state) {
    this.run = { ...this.run, state: state ?? this.run.state };
    // A poll that began before the action may still bring the state before it.
    if (state) this.ending = LEADS_TO_END.includes(state);
    this.seen = {};
    this.paint();
    this.polling.now();
  }

  lost(error) {
    if (error.status === 401) return;
    if (error.status === 404) {
      this.polling.stop();
      this.node.replaceChildren(h("section", { class: "card alone" }, h("h1", {}, "Run not found"), h("p", {}, error.message), h("p", {}, h("a", { href: "#/" }, "All runs"))));
    }
    const last = this.run?.state;
    const over = error.status === 0 && (this.ending || LEADS_TO_END.includes(last));
    this.status.lost(over ? "The run and its server have ended." : error.message);
    if (over) {
      this.run = { ...this.run, state: "stopped" };
      this.paint();
      if (!this.service) this.polling.stop();
    }
  }

  // Drawing ---------------------------------------------------------------------------------------------------------

  paint() {
    if (!this.run) return;
    const rows = this.rows.window(this.range, MOST_ROWS);
    const run = { ...this.run, last: rows.at(-1) };
    const marks = this.audit
      .map((record) => ({ t: this.rows.at(Date.parse(record.time) / 1000), label: labelOf(record) }))
      .filter((mark) => mark.t !== null && Number.isFinite(mark.t));
    const live = Boolean(run.progress) && !ENDED.includes(run.state);
    this.paintHead(run);
    this.actions.allow(run.state, this.service);
    show(this.actions.node, !run.on_disk);
    show(this.log.node, this.service && !run.on_disk);
    this.staleness.draw(rows, run, marks);
    this.staleness.allow(live);
    this.diagnosis.draw(run.diagnosis ?? null);
    this.outcome.draw(run);
    const any = rows.length > 0 || live;
    for (const node of [this.staleness.node, this.ranges, this.grid]) show(node, any);
    this.panels.draw(rows, { ...run, target: run.target ?? { return: resultsOf(run).target } }, marks);
    this.paintComponents(run.components ?? []);
    show(this.settings.node.parentElement, live);
    document.title = `${run.state}: ${this.id} · tianflow`;
  }

  paintHead(run) {
    this.state.className = `state ${stateClass(run.state)}`;
    setText(this.state, run.state);
    setText(this.lead, [run.algorithm, run.environment].filter(Boolean).join(" on "));
    show(this.strip, run.progress || run.summary || run.last);
    const over = ENDED.includes(run.state) && !run.progress;
    const reasons = (run.reasons ?? []).filter(Boolean);
    if (run.state === "pending" && !reasons.length) reasons.push("it waits for capacity");
    show(this.reasons, !over && !run.ready && reasons.length && !run.on_disk);
    setText(this.reasons, capital(reasons.join("; ")));
    show(this.onDisk, run.on_disk);
    setText(this.onDisk, `This page only reads the run. ${capital(reasons.join("; "))}.`);
    const left = Object.values(run.progress?.time_left_s ?? {});
    const results = resultsOf(run);
    setText(this.facts.elapsed, duration(results.seconds));
    setText(this.facts.steps, whole(results.steps));
    setText(this.facts.episodes, whole(results.episodes));
    setText(this.facts.updates, whole(results.updates));
    setText(this.facts["steps/s"], number(results.speed));
    setText(this.facts.return, number(results.training));
    setText(this.facts.evaluation, number(results.evaluation));
    setText(this.names.left, over ? "target" : "left");
    setText(this.facts.left, over ? targetMet(results) : left.length ? duration(Math.min(...left), 1) : "–");
  }

  paintComponents(components) {
    show(this.table, components.length > 0);
    if (!this.table.open) return;
    this.components.replaceChildren(
      ...components.map((found) => h("tr", {}, ...[found.name, found.role, found.host, found.state, `generation ${found.generation}`].map((text) => h("td", {}, text)))),
    );
  }
}
