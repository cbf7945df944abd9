// Deletes ended runs after a confirmation.

import { ask, runPath } from "./api.js";
import { announce, h, setText, show } from "./dom.js";

const MOST_NAMED = 8;

/** A dialog that deletes runs. `done()` is called when they are gone; a refusal becomes the text of `error`. */
export class Removal {
  constructor({ error, done }) {
    this.error = error;
    this.done = done;
  }

  /** Ask whether to delete the runs `ids`. */
  confirm(ids) {
    const title = ids.length === 1 ? "Delete this run?" : `Delete ${ids.length} runs?`;
    const more = ids.length > MOST_NAMED ? [h("li", {}, `and ${ids.length - MOST_NAMED} more`)] : [];
    const no = h("button", { type: "button", onclick: () => this.dialog.close() }, "Cancel");
    const yes = h("button", { type: "button", class: "danger", onclick: () => this.confirmed(ids) }, ids.length === 1 ? `Delete ${ids[0]}` : `Delete ${ids.length} runs`);
    this.dialog = h(
      "dialog",
      { "aria-labelledby": "delete-title", onclose: () => this.dialog.remove() },
      h("h2", { id: "delete-title" }, title),
      h("ul", { class: "run-names" }, ...ids.slice(0, MOST_NAMED).map((id) => h("li", {}, id)), ...more),
      h("p", {}, "Checkpoints, history, settings and log are deleted from the disk. This cannot be undone."),
      h("div", { class: "row" }, yes, no),
    );
    document.body.append(this.dialog);
    this.dialog.showModal();
    no.focus();
  }

  async confirmed(ids) {
    this.dialog.close();
    show(this.error, false);
    const refused = [];
    for (const id of ids) {
      try {
        await ask(runPath(id), { method: "DELETE" });
      } catch (error) {
        refused.push(error.message);
      }
    }
    const count = ids.length - refused.length;
    if (count) announce(`Deleted: ${count} ${count === 1 ? "run" : "runs"}`);
    if (refused.length) {
      setText(this.error, [...new Set(refused)].join(" "));
      show(this.error, true);
    }
    if (count) this.done();
  }
}
