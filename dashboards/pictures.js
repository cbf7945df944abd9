// Pictures of panels, from the series in the page.

import { Chart } from "./charts.js";
import { linePicture, sharePicture, timeSpan } from "./panels.js";

const OTHERS = 8;
const panels = JSON.parse(document.getElementById("panels").textContent);
const charts = panels.map(({ title, unit, times, shares, series }) => {
  const chart = new Chart({ title, unit, css: shares ? "shares" : "" });
  chart.watcher.disconnect();
  const names = Object.keys(series);
  const rows = times.map((t, at) => ({ t, values: Object.fromEntries(names.map((name) => [name, series[name].values[at]])) }));
  const lines = names.map((name, at) => ({ name, css: `c${at % OTHERS}`, steps: series[name].steps, of: (row) => row.values[name] }));
  const known = rows.map((row) => ({ ...row, shares: Object.values(row.values).some(Number.isFinite) ? { all: row.values } : {} }));
  const picture = shares ? sharePicture("all", known) : linePicture({ lines: () => lines }, rows, {});
  chart.draw({ rows: known, x: timeSpan(rows), marks: [], ...picture });
  return chart;
});
document.getElementById("charts").replaceChildren(...charts.map((chart) => chart.node));
