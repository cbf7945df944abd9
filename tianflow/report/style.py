"""Style sheet of a report: light and dark by the reader's system, on paper, narrow and wide."""

from __future__ import annotations

from tianflow.report.markup import Markup
from tianflow.report.scripts import chart_styles

PAGE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1b1f24; --soft: #57606a; --edge: #d5dae0; --grid: #e6e9ed; --shadow: none;
  --c0: #0b62a4; --c1: #b45309; --c2: #0f7b4f; --c3: #a83279; --c4: #6750a4; --c5: #66727d; --c6: #0e7490; --c7: #7a6a00; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1318; --card: #181d24; --ink: #e6eaef; --soft: #a2acb7; --edge: #313943;
  --grid: #272e37;
  --c0: #6cb2f5; --c1: #f0a35e; --c2: #5fcf9b; --c3: #e58cc0; --c4: #b6a3f0; --c5: #8b97a3; --c6: #5ccbe0; --c7: #d4c24a; } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 32px 0 12px; font-size: 1.15rem; }
h3 { margin: 0; font-size: 1rem; }
ul { padding: 0; }
.state { display: inline-block; padding: 1px 10px; border: 1px solid var(--edge); border-radius: 999px; font-size: .9rem; }
.lead, .note { margin: 6px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.error { margin: 12px 0 0; padding: 8px 12px; border-left: 4px solid var(--c1); background: var(--card); overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 290px), 1fr)); gap: 0 32px; margin: 0; padding: 8px 16px;
  background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
.facts div { display: flex; justify-content: space-between; gap: 16px; padding: 5px 0; border-bottom: 1px solid var(--grid); }
.facts dt { color: var(--soft); white-space: nowrap; }
.facts dd { margin: 0; text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
figure { margin: 0; break-inside: avoid; }
.unit { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px; }
table { width: 100%; min-width: 560px; border-collapse: collapse; font-size: .9rem; }
th, td { padding: 6px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; } td:first-child { white-space: nowrap; }
summary { cursor: pointer; }
pre { margin: 12px 0 0; padding: 12px 16px; overflow-x: auto; background: var(--card); border: 1px solid var(--edge); border-radius: 8px;
  font-size: .85rem; }
@media (max-width: 520px) { .facts div { gap: 8px; } main { padding: 16px 12px 32px; } }
@media print { body { background: none; } details { display: block; } }
"""
ABOVE_CHARTS = """
.charts .tall { grid-column: 1 / -1; }
@media print { .charts { grid-template-columns: 1fr 1fr; } }
"""


def css() -> Markup:
    """The style sheet."""
    return Markup(PAGE + chart_styles() + ABOVE_CHARTS)
