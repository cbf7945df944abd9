// The charts of a report, from the history in the page.

import { h } from "./dom.js";
import { Panels } from "./panels.js";
import { smoothed } from "./rates.js";
import { stalenessChart, stalenessPicture } from "./staleness.js";

const { rows, target } = JSON.parse(document.getElementById("history").textContent);
const marks = rows
  .flatMap((row) => row.marks ?? [])
  .filter((mark) => ["change", "resumed"].includes(mark.kind) && Number.isFinite(mark.t))
  .map((mark) => ({ t: mark.t, label: mark.paths?.join(", ") || mark.action || mark.kind }));
const grid = h("div", { class: "charts" });
document.getElementById("charts").replaceChildren(grid);
const panels = new Panels(grid);
const staleness = stalenessChart();
grid.prepend(staleness.node);
staleness.draw(stalenessPicture(rows, marks));
panels.draw(smoothed(rows), { target: { return: target } }, marks);
// Paper has another width, and there charts out of sight are drawn again, too.
for (const chart of [staleness, ...panels.charts.values()]) chart.watcher.disconnect();
