"""How a report looks: light and dark as the reader's system has it, on paper, and from narrow to
wide.
"""

from __future__ import annotations

from tianflow.report.markup import Markup

CSS = Markup(
    """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #57606a; --edge: #d5dae0; --grid: #e6e9ed;
  --c0: #0b62a4; --c1: #b45309; --c2: #0f7b4f; --c3: #a83279; --c4: #6750a4; --c5: #66727d; --c6: #0e7490; --c7: #7a6a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --card: #181d24; --ink: #e6eaef; --soft: #a2acb7; --edge: #313943;
  --grid: #272e37;
  --c0: #6cb2f5; --c1: #f0a35e; --c2: #5fcf9b; --c3: #e58cc0; --c4: #b6a3f0; --c5: #8b97a3; --c6: #5ccbe0; --c7: #d4c24a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 32px 0 12px; font-size: 1.15rem; }
.state { display: inline-block; padding: 1px 10px; border: 1px solid var(--edge); border-radius: 999px; font-size: .9rem; }
.lead, .note { margin: 6px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.error { margin: 12px 0 0; padding: 8px 12px; border-left: 4px solid var(--c1); background: var(--card); overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); gap: 0 32px; margin: 0; padding: 8px 16px;
  background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.facts div { display: flex; justify-content: space-between; gap: 16px; padding: 5px 0; border-bottom: 1px solid var(--grid); }
.facts dt { color: var(--soft); white-space: nowrap; }
.facts dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px 14px; min-width: 0; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  break-inside: avoid; }
.unit, .nothing { color: var(--soft); font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 4px 0; padding: 0; list-style: none;
  color: var(--soft); font-size: .85rem; }
.swatch { display: inline-block; width: 16px; height: 0; margin-right: 6px; vertical-align: middle; border-top: 3px solid var(--colour); }
.swatch.step { border-top-style: dashed; }
.swatch.area { height: 11px; border: 0; background: var(--colour); opacity: .75; border-radius: 2px; }
.swatch.round { width: 9px; height: 9px; border: 0; background: var(--colour); border-radius: 50%; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.tick-y { text-anchor: end; } .tick-x, .name { text-anchor: middle; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); }
.line { fill: none; stroke: var(--colour); stroke-width: 1.75; stroke-linejoin: round; } .line.step { stroke-dasharray: 6 3; }
.band { fill: var(--colour); fill-opacity: .18; stroke: var(--colour); stroke-opacity: .25; }
.share { fill: var(--colour); fill-opacity: .75; stroke: var(--card); stroke-width: .75; }
.dot { fill: var(--colour); stroke: var(--card); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1.25; stroke-dasharray: 2 4; }
.c0 { --colour: var(--c0); } .c1 { --colour: var(--c1); } .c2 { --colour: var(--c2); } .c3 { --colour: var(--c3); }
.c4 { --colour: var(--c4); } .c5 { --colour: var(--c5); } .c6 { --colour: var(--c6); } .c7 { --colour: var(--c7); }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
table { width: 100%; min-width: 560px; border-collapse: collapse; font-size: .9rem; }
th, td { padding: 6px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } td:first-child { white-space: nowrap; }
summary { cursor: pointer; }
pre { margin: 12px 0 0; padding: 12px 16px; overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  font-size: .85rem; }
@media (max-width: 520px) { svg text { font-size: 18px; } .facts div { gap: 8px; } main { padding: 16px 12px 32px; } }
@media print { body { background: none; } details { display: block; } }
"""
)
