"""Style sheet of a report: light and dark, on a phone, on a screen and in print."""

STYLE = """
:root { --paper: #ffffff; --ink: #1a1a1a; --soft: #5a5f66; --rule: #d9d9d9; --panel: #f5f6f8; --link: #0b57a4;
  --good: #1a7f4b; --bad: #b3261e; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8e8e8; --soft: #a3a9b1; --rule: #3a4048;
  --panel: #1e2329; --link: #8ab8f0; --good: #6fd39b; --bad: #ff8a80; --warn: #f0c060; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Open Sans", "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 64px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 40px 0 12px; padding-top: 12px; border-top: 1px solid var(--rule); }
h3 { font-size: 16px; margin: 24px 0 8px; }
h1, p, dd, td, summary, figcaption { overflow-wrap: anywhere; }
p { margin: 6px 0; }
.kicker { color: var(--soft); font-size: 13px; margin: 0; }
.path, .note, figcaption { color: var(--soft); font-size: 13px; }
.note { border-left: 3px solid var(--rule); padding-left: 10px; }
.figures h3 { margin-top: 0; }
.state { font-size: 14px; font-weight: 600; padding: 2px 10px; border: 1px solid currentColor; border-radius: 12px;
  vertical-align: middle; white-space: nowrap; color: var(--soft); }
.running, .done { color: var(--good); }
.failed, .killed, .damaged { color: var(--bad); }
.stopped, .preempted, .signal, .silent { color: var(--warn); }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 20px 0 0; }
a { color: var(--link); }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; background: var(--panel); padding: 2px 6px;
  border-radius: 4px; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr)); gap: 8px; margin: 16px 0; }
dl > div { background: var(--panel); border-radius: 6px; padding: 8px 12px; }
dt { color: var(--soft); font-size: 12px; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 20px 24px;
  align-items: start; margin: 12px 0; }
figure { margin: 0; min-width: 0; max-width: 560px; }
svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg text { font-family: "DejaVu Sans", system-ui, sans-serif !important; }
figcaption { margin-top: 4px; }
.scroll { overflow-x: auto; min-width: 0; margin: 8px 0; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { max-width: 640px; }
td:not(.number) { min-width: 100px; }
td:nth-child(n+3):last-child:not(.number) { min-width: 160px; }
.number { text-align: right; white-space: nowrap; }
details { margin: 12px 0; }
summary { cursor: pointer; color: var(--link); font-weight: 600; }
@media (max-width: 600px) { main { padding: 16px 12px 48px; } h1 { font-size: 23px; }
  dl { grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); } }
@media print { main { max-width: none; padding: 0; } nav { display: none; }
  figure, dl > div, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; } .scroll { overflow: visible; } }
"""
