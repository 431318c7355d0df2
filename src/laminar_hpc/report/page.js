const box = document.getElementById('timeline');
if (box) {
  const over = document.getElementById('overview'), view = document.getElementById('detail-view');
  const brush = document.getElementById('brush'), label = document.getElementById('window');
  const axis = document.querySelector('#detail .ticks');
  const total = +box.dataset.total, left = +box.dataset.left;
  const width = +box.dataset.width, plot = width - left;
  const show = (t0, t1) => {
    t0 = Math.max(0, t0); t1 = Math.min(total, Math.max(t1, t0 + 0.05));
    const b = view.viewBox.baseVal; b.x = t0; b.width = t1 - t0;
    brush.setAttribute('x', left + t0 / total * plot);
    brush.setAttribute('width', Math.max(2, (t1 - t0) / total * plot));
    const raw = (t1 - t0) / 10, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= raw * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    label.textContent = `${t0.toFixed(digits)} s to ${t1.toFixed(digits)} s`;
    axis.replaceChildren();
    for (let i = Math.ceil(t0 / step - 1e-9); i * step <= t1 + 1e-9; i++) {
      const tick = document.createElementNS('http://www.w3.org/2000/svg', 'text');
      tick.setAttribute('class', 'tick'); tick.setAttribute('text-anchor', 'middle');
      tick.setAttribute('y', axis.dataset.y);
      tick.setAttribute('x', left + (i * step - t0) / (t1 - t0) * plot);
      tick.textContent = (i * step).toFixed(digits);
      axis.append(tick);
    }
  };
  const at = event => {
    const r = over.getBoundingClientRect();
    return Math.min(total, Math.max(0, ((event.clientX - r.left) / r.width * width - left) / plot * total));
  };
  let from = null;
  over.addEventListener('pointerdown', e => {
    from = at(e); over.setPointerCapture(e.pointerId); e.preventDefault();
  });
  over.addEventListener('pointermove', e => {
    if (from !== null) show(Math.min(from, at(e)), Math.max(from, at(e)));
  });
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
