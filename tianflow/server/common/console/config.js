// All settings of a run that have an effect on its training, to read.

import { ask, runPath } from "./api.js";
import { h } from "./dom.js";
import { flattened } from "./flat.js";
import { shortValue } from "./words.js";

/** A table of settings by section. */
export class ConfigPanel {
  constructor(id) {
    this.id = id;
    this.sections = null;
    this.key = null;
    this.body = h("div", { class: "sections" });
    this.node = h("details", { class: "card", id: "config" }, h("summary", {}, "Settings of the run"), this.body);
  }

  /** Load the settings again if `key` differs from that of the last time. Returns the sections; null if there are none. */
  async follow(key) {
    if (key === this.key) return this.sections;
    try {
      this.sections = (await ask(runPath(this.id, "/config"))).data?.config ?? null;
      this.key = key;
      this.draw();
    } catch (error) {
      if (error.status === 401 || error.status === 0) throw error;
    }
    return this.sections;
  }

  draw() {
    const parts = Object.entries(this.sections ?? {}).map(([section, values]) => {
      const rows = [...flattened(values)].map(([path, value]) => h("div", {}, h("dt", {}, path), h("dd", {}, shortValue(value))));
      return h("section", {}, h("h3", {}, section), h("dl", { class: "settings-list" }, ...rows));
    });
    this.body.replaceChildren(...parts);
  }
}
