"""The report's frame: HTML, style and the one script (zoom of the time line). Everything is inline; the page
loads nothing.

Colours are CSS variables with a light and a dark set, chosen by the reader's system.
"""

from collections.abc import Mapping

from laminar_hpc.observability.svg import tag, text

STYLE = """
:root { --page:#f6f7f9; --card:#ffffff; --text:#1d2330; --soft:#5d6675; --line:#e3e6eb; --none:#eef0f3; --wait:#cfd4dc;
  --generate:#3f78c9; --train:#e2673b; --publish:#a44fb0; --send:#d3a5da; --pull:#3d9a62; --score:#dfb43a; --evaluate:#2fa5a0;
  --checkpoint:#94704f; --load:#8994a5; --relay:#c98fd1; --move:#1f2a44; --good:#2b8a57; --bad:#c0453b; --inside:#ffffff }
@media (prefers-color-scheme: dark) { :root { --page:#14171d; --card:#1c2129; --text:#e6e9ef; --soft:#98a2b3; --line:#2e3540;
  --none:#262c36; --wait:#465061; --generate:#5b93e4; --train:#ee7f53; --publish:#bd6fc9; --send:#7d5683; --pull:#52b77b; --score:#e5be4f;
  --move:#f2f4f8;
  --evaluate:#46bdb8; --checkpoint:#b08a66; --load:#748093; --relay:#a873b1; --good:#52b77b; --bad:#e5695e; --inside:#ffffff } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--text); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif }
main { max-width:1240px; margin:0 auto; padding:28px 24px 60px }
header { display:flex; flex-wrap:wrap; align-items:baseline; gap:4px 18px; margin-bottom:16px }
h1 { font-size:25px; margin:0; letter-spacing:-.01em } h2 { font-size:18px; margin:0 0 2px } h3 { font-size:14px; margin:0 0 2px }
header p, .note, .hint { color:var(--soft); margin:0 } .note { margin:0 0 12px } .hint { margin:6px 0 8px; font-size:13px }
.state { font-weight:600; padding:1px 10px; border-radius:99px; font-size:13px; border:1px solid currentColor }
.tiles { display:grid; grid-template-columns:repeat(4,1fr); gap:12px; margin-bottom:18px }
.tile { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:11px 14px 12px }
.tile span { display:block; color:var(--soft); font-size:12.5px }
.tile b { font-size:24px; line-height:1.25; letter-spacing:-.02em; white-space:nowrap }
section { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:18px 20px; margin-bottom:18px }
.two, .three { display:grid; grid-template-columns:repeat(2,1fr); gap:14px 26px } .three { grid-template-columns:repeat(3,1fr) }
@media (max-width:820px) { .two, .three { grid-template-columns:1fr } .tiles { grid-template-columns:repeat(2,1fr) } }
figure { margin:0; min-width:0 } svg { display:block; width:100%; height:auto } svg svg { display:inline }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:12.5px; color:var(--soft); margin:2px 0 6px; min-height:19px }
.legend i { display:inline-block; width:10px; height:10px; border-radius:3px; margin-right:5px }
text { font-family:inherit; fill:var(--text) } .tick, .name, .none { fill:var(--soft); font-size:11.5px } text.none { font-size:13px }
.row { font-size:12.5px } .timeline { overflow:visible } .launch { stroke:var(--text); stroke-width:2 }
.value { font-size:11.5px; fill:var(--soft); paint-order:stroke; stroke:var(--card); stroke-width:3px; stroke-linejoin:round }
.inside, .on-light { font-size:11.5px }
.inside { fill:var(--inside) } .on-light { fill:var(--soft) }
.grid { stroke:var(--line) } .axis { stroke:var(--soft) } .mark { stroke:var(--soft); stroke-dasharray:3 3 }
.line { stroke-width:2; stroke-linejoin:round } .faint { stroke-width:1.2; opacity:.45 }
#brush { fill:var(--text); fill-opacity:.1; stroke:var(--text); stroke-width:1 } #overview { cursor:crosshair } .script { display:none }
table { border-collapse:collapse; width:100%; font-size:13.5px } th { text-align:left; color:var(--soft); font-weight:500 }
th, td { padding:5px 12px 5px 0; border-bottom:1px solid var(--line); vertical-align:top } tr:last-child td { border-bottom:0 }
code { font:12.5px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace; overflow-wrap:anywhere; white-space:pre-wrap }
.samples td:nth-child(4) { width:40% } a { color:inherit } .trajectory { border-top:1px solid var(--line); padding-top:6px }
.trajectory p { margin:2px 0 10px } .trajectory .two { margin-top:12px } .good { color:var(--good) } .bad { color:var(--bad) }
details { margin-top:10px } summary { cursor:pointer; color:var(--soft) } .keys { columns:3; font-size:13px; margin-top:8px }
.keys div { break-inside:avoid; display:flex; justify-content:space-between; gap:12px; border-bottom:1px solid var(--line); padding:2px 0 }
.keys div span { color:var(--soft) } .keys div b { font-weight:500; text-align:right; overflow-wrap:anywhere }
@media (max-width:820px) { .keys { columns:1 } } @media print { section { break-inside:avoid } }
"""

SCRIPT = """
const box = document.getElementById('timeline');
if (box) {
  const over = document.getElementById('overview'), view = document.getElementById('detail-view');
  const brush = document.getElementById('brush'), label = document.getElementById('window');
  const axis = document.querySelector('#detail .ticks');
  const total = +box.dataset.total, left = +box.dataset.left, width = +box.dataset.width, plot = width - left;
  const show = (t0, t1) => {
    t0 = Math.max(0, t0); t1 = Math.min(total, Math.max(t1, t0 + 0.05));
    const b = view.viewBox.baseVal; b.x = t0; b.width = t1 - t0;
    brush.setAttribute('x', left + t0 / total * plot); brush.setAttribute('width', Math.max(2, (t1 - t0) / total * plot));
    const raw = (t1 - t0) / 10, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * 0.999), digits = Math.max(0, -Math.floor(Math.log10(step)));
    label.textContent = `${t0.toFixed(digits)} s to ${t1.toFixed(digits)} s`;
    axis.replaceChildren();
    for (let i = Math.ceil(t0 / step - 1e-9); i * step <= t1 + 1e-9; i++) {
      const tick = document.createElementNS('http://www.w3.org/2000/svg', 'text');
      tick.setAttribute('class', 'tick'); tick.setAttribute('text-anchor', 'middle'); tick.setAttribute('y', axis.dataset.y);
      tick.setAttribute('x', left + (i * step - t0) / (t1 - t0) * plot); tick.textContent = (i * step).toFixed(digits);
      axis.append(tick);
    }
  };
  const at = event => {
    const r = over.getBoundingClientRect();
    return Math.min(total, Math.max(0, ((event.clientX - r.left) / r.width * width - left) / plot * total));
  };
  let from = null;
  over.addEventListener('pointerdown', e => { from = at(e); over.setPointerCapture(e.pointerId); e.preventDefault(); });
  over.addEventListener('pointermove', e => { if (from !== null) show(Math.min(from, at(e)), Math.max(from, at(e))); });
  over.addEventListener('pointerup', e => {
    const half = view.viewBox.baseVal.width / 2;
    if (from !== null && Math.abs(at(e) - from) < total / 400) show(from - half, from + half);
    from = null;
  });
  over.addEventListener('dblclick', () => show(0, total));
  const b = view.viewBox.baseVal; show(b.x, b.x + b.width);
  for (const e of document.querySelectorAll('.script')) e.style.display = 'inline';
}
const opened = () => {
  const e = location.hash && document.getElementById(location.hash.slice(1));
  if (e && e.tagName === 'DETAILS') e.open = true;
};
addEventListener('hashchange', opened); opened();
"""


def page(title: str, body: str) -> str:
    """The whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head><body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, content: str, note: str = "") -> str:
    """A card with a heading; `content` is HTML."""
    return tag(
        "section", tag("h2", text(title)) + (tag("p", text(note), class_="note") if note else "") + content
    )


def figure(title: str, chart: str, legend: str = "") -> str:
    return tag("figure", tag("h3", text(title)) + legend + chart)


def grid(columns: str, *figures: str) -> str:
    """Figures side by side; `columns`: two or three."""
    return tag("div", "".join(figures), class_=columns)


def tiles(values: list[tuple[str, str, str]]) -> str:
    """Headline numbers: (name, value, what goes with it)."""
    parts = (
        tag("span", text(name)) + tag("b", text(value)) + tag("span", text(more))
        for name, value, more in values
    )
    return tag("div", "".join(tag("div", part, class_="tile") for part in parts), class_="tiles")


def keys(values: Mapping[str, object]) -> str:
    """Names and values in columns."""
    return tag(
        "div",
        "".join(tag("div", tag("span", text(k)) + tag("b", text(v))) for k, v in values.items()),
        class_="keys",
    )
