'use strict';

/* Pointing, clicking and dragging in strips and pictures of layers. */

/** A click on a strip selects the strongest token there; pointing names it. */
function listenToStrips(field) {
  const found = (event) => {
    const canvas = event.target.closest('label > canvas');
    if (!canvas) return null;
    const own = views[canvas.parentElement.control.value];
    return { own, index: zoom[0] + stripIndex(canvas, event, shadesOf(own).slice(...zoom)) };
  };
  field.addEventListener('click', (event) => {
    const at = found(event);
    if (at) act('jump', at.index);
  });
  field.addEventListener('pointermove', (event) => {
    const at = found(event);
    if (!at || event.pointerType === 'touch') return;
    const { own, index } = at;
    showTip(boxOf(event), [`Token ${index} “`, named(example().tokens[index]), `”: ${short(own.values[index])}`]);
  });
  field.addEventListener('pointerleave', hideTip);
}

/** Describe a cell of the map, and return its token. */
function mapCell(canvas, event) {
  const map = usableMap();
  if (!map) return null;
  const [row, column] = cellAt(canvas, event, map.size, map.size);
  const names = example().tokens;
  const said = `: token ${row} “${names[row]}” receives ${short(map.row(row)[column])} from token ${column} “${names[column]}”`;
  return { index: row, said: `Layer ${map.facts.index}${said}` };
}

/** Describe a cell of the layers' inputs; return its layer and token. */
function enteringCell(canvas, event) {
  const [row, column] = cellAt(canvas, event, entering.layers, zoom[1] - zoom[0]);
  const [layer, index] = [entering.layers - 1 - row, zoom[0] + column];
  return { index, layer, said: `Input of layer ${layer} at token ${index} “${example().tokens[index]}”: ${short(entering.at(layer, index))}` };
}

/** Pointing at a picture points at its token; a click keeps the token and chooses the layer. */
function listenToChart(chart, cell) {
  const canvas = chart.querySelector('canvas');
  canvas.addEventListener('pointermove', (event) => {
    const at = cell(canvas, event);
    if (at) act('point', at.index, { box: boxOf(event), content: [at.said] });
  });
  canvas.addEventListener('pointerleave', () => act('point', null));
  canvas.addEventListener('click', (event) => {
    const at = cell(canvas, event);
    if (!at) return;
    const place = layers.findIndex(({ facts }) => facts.index === at.layer);
    if (place >= 0) chooseLayer(place);
    if (chosen.kept !== at.index) act('jump', at.index);
  });
}

/** The range of tokens in strips and layers: the first, and the end, which is excluded. */
let zoom = [0, 0];
/** The fewest shown tokens of a long text, and the most marked sentences. */
const CLOSEST = 20;
const MARKS = 60;
/** The pixels after which a movement is a drag. */
const DRAGGED = 8;

/** Show only about these tokens. */
function zoomTo(start, end) {
  const { length: size } = example().tokens;
  const count = Math.min(size, Math.max(CLOSEST, Math.round(end - start)));
  const first = Math.max(0, Math.min(size - count, Math.round(start)));
  zoom = [first, first + count];
  byId('zoomed').textContent = count === size ? `all ${size} tokens` : `tokens ${first} to ${first + count - 1}`;
}

/** Zoom in around the kept or strongest token, or zoom out. */
function zoomBy(factor) {
  const [best] = strongest(shadesOf(view()), 1);
  const middle = factor > 1 ? (zoom[0] + zoom[1]) / 2 : (chosen.kept ?? best ?? 0);
  const half = ((zoom[1] - zoom[0]) * factor) / 2;
  zoomTo(middle - half, middle + half);
}

/** Mark where sentences begin, behind a picture's columns. */
function markSentences(canvas) {
  const [first, end] = zoom;
  const begun = example().sentences.filter((at) => at > first && at < end);
  const few = begun.length <= MARKS && example().tokens.length > LONG;
  const mark = (at) => `linear-gradient(color-mix(in srgb, var(--quiet) 55%, transparent) 0 0) ${(100 * (at - first)) / (end - first)}% 0 / 1px 100% no-repeat`;
  canvas.style.background = few ? begun.map(mark).join() : '';
}

/** A drag across a strip or a picture of layers zooms in; then `changed` is called. */
function listenToDrags(changed) {
  let from = null; // the canvas, and where the drag began
  let done = false;
  const ends = (event) => [from.x, event.clientX].sort((a, b) => a - b).map((x) => {
    const { left, width } = from.canvas.getBoundingClientRect();
    return Math.max(0, Math.min(1, (x - left) / width));
  });
  const drags = (event) => Math.abs(event.clientX - from.x) >= DRAGGED;
  addEventListener('pointerdown', (event) => {
    done = false;
    const canvas = event.target.closest('#methods label > canvas, #entering canvas');
    from = canvas && !byId('zoom').hidden ? { canvas, x: event.clientX } : null;
  });
  addEventListener('pointermove', (event) => {
    if (!from || !drags(event)) return;
    const [left, right] = ends(event).map((share) => 100 * share);
    const steps = `transparent ${left}%, color-mix(in srgb, var(--accent) 35%, transparent) ${left}% ${right}%, transparent ${right}%`;
    from.canvas.style.background = `linear-gradient(90deg, ${steps})`;
  });
  addEventListener('pointerup', (event) => {
    if (from && drags(event)) {
      const [first, end] = zoom;
      zoomTo(...ends(event).map((share) => first + share * (end - first)));
      done = true;
      changed();
    }
    from = null;
  });
  addEventListener('pointercancel', () => {
    if (from) markSentences(from.canvas);
    from = null;
  });
  // a drag is not a click on a token or a method
  document.addEventListener('click', (event) => {
    if (!done) return;
    done = false;
    event.preventDefault();
    event.stopPropagation();
  }, true);
}
