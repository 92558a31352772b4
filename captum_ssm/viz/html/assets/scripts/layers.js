'use strict';

/* Relevance at each layer's input, and token-to-token maps. */

/** Axes of up to this number of tokens or layers have names. */
const NAMED = 40;
/** The most columns of a picture; further columns are merged. */
const COLUMNS = 640;

/** Relevance at each layer's input; answers.py packs the bytes. */
class Entering {
  constructor(block, size) {
    const bytes = BLOCKS[block];
    this.size = size;
    this.layers = bytes.length / (4 + 2 * size);
    const scales = new Float32Array(bytes.buffer.slice(0, 4 * this.layers));
    const steps = new Int16Array(bytes.buffer.slice(4 * this.layers));
    this.values = Float32Array.from(steps, (step, at) => (step / (2 ** 15 - 1)) * scales[Math.floor(at / size)]);
  }

  /** Return the relevance at a layer's input for a token. */
  at(layer, token) {
    return this.values[layer * this.size + token];
  }

  /** Subtract the relevance for a second answer. */
  less(other) {
    const made = Object.assign(Object.create(Entering.prototype), this);
    made.values = this.values.map((value, at) => value - other.values[at]);
    return made;
  }

  /** Return a picture's cells for some tokens, the last layer on top, each with its strongest value. */
  cells(first, last) {
    const cell = Math.ceil((last - first) / COLUMNS);
    const width = Math.ceil((last - first) / cell);
    const found = [];
    for (let layer = this.layers - 1; layer >= 0; layer--) {
      for (let start = first; start < last; start += cell) {
        const end = Math.min(start + cell, last);
        found.push(strongestOf(this.values.subarray(layer * this.size + start, layer * this.size + end)));
      }
    }
    return { width, found };
  }
}

/** Cached blocks. */
const entered = new Map();

/** Return a view's relevance at each layer's input, or null. */
function enteringOf({ streams }, size) {
  if (!streams || streams.some((block) => block === null)) return null;
  const [one, other] = streams.map((block) => {
    if (!entered.has(block)) entered.set(block, new Entering(block, size));
    return entered.get(block);
  });
  return other ? one.less(other) : one;
}

/** Return the names of tokens along an axis; patches have row and column. */
const axisNames = (tokens) => tokens.map((token) => token.replace(/^row (\d+), column (\d+)$/, '$1, $2'));

/** Write names beside a picture's rows and columns if there are few. */
function nameAxes(chart, rows, columns) {
  const fill = (holder, names) => {
    const few = names.length <= NAMED;
    holder.replaceChildren(...(few ? names.map((name) => make('bdi', {}, name)) : []));
    holder.hidden = !few;
  };
  fill(chart.querySelector('.rows'), rows);
  fill(chart.querySelector('.columns'), columns);
  chart.style.setProperty('--rows', rows.length);
  chart.style.setProperty('--columns', columns.length <= NAMED ? columns.length : 0);
}

/** Move a line of a picture to the middle of a row or column, or hide it. */
function placeLine(chart, name, index, count) {
  const line = chart.querySelector(`.${name}`);
  line.hidden = index === null;
  if (index !== null) line.style[name === 'row' ? 'top' : 'left'] = `${(100 * (index + 0.5)) / count}%`;
}

/** Return the row and column of a picture at a pointer event. */
function cellAt(canvas, event, rows, columns) {
  const box = canvas.getBoundingClientRect();
  const at = (place, start, length, count) =>
    Math.max(0, Math.min(count - 1, Math.floor(((place - start) / length) * count)));
  return [at(event.clientY, box.top, box.height, rows), at(event.clientX, box.left, box.width, columns)];
}

/** Paint the relevance at each layer's input. */
function paintEntering(chart, entering, names) {
  const { width, found } = entering.cells(...zoom);
  const canvas = chart.querySelector('canvas');
  const largest = largestOf(entering.values);
  if (entering.size > LONG) paintCells(canvas, found.map((value) => shadeOf(value, largest)), width, entering.layers, 1);
  else paintCells(canvas, found, width, entering.layers, largest);
  canvas.setAttribute('aria-label', `Relevance at the inputs of ${entering.layers} layers, for ${entering.size} tokens`);
  nameAxes(chart, Array.from({ length: entering.layers }, (_, i) => `layer ${entering.layers - 1 - i}`), axisNames(names.slice(...zoom)));
  markSentences(canvas);
}

/** Paint the cells of a layer's map as square roots, because most are far below the largest. */
function paintSmall(canvas, map) {
  const shades = map.overview().map((value) => shadeOf(value, 1));
  paintCells(canvas, shades, map.facts.side, map.facts.side, 1, 1);
}

/** Make a radio button with a small map for each layer; `chosen` is the checked one. */
function makeThumbnails(field, layers, chosen) {
  field.hidden = layers.length < 2;
  const labels = layers.map(({ facts: { index, family } }, place) => {
    const radio = make('input', { type: 'radio', name: 'layer', value: place, checked: place === chosen });
    radio.setAttribute('aria-label', `layer ${index}`);
    const canvas = make('canvas');
    canvas.setAttribute('aria-hidden', 'true');
    return make('label', { title: `layer ${index}: ${family}` }, radio, canvas, String(index));
  });
  field.replaceChildren(field.querySelector('legend'), ...labels);
}

/** Paint a layer's map. */
function paintMap(chart, map, names) {
  const { index, size } = map.facts;
  const canvas = chart.querySelector('canvas');
  paintSmall(canvas, map);
  canvas.setAttribute('aria-label', `The map of layer ${index}: ${size} by ${size} tokens`);
  nameAxes(chart, axisNames(names), axisNames(names));
}

/** Describe a layer's map and the stored entries. */
function mapNotes(map, tokens) {
  const { index, cell, largest, size, kept } = map.facts;
  const pooled = cell === 1 ? '' : ` Each cell shows the strongest of ${cell} × ${cell} entries.`;
  const fits = size === tokens ? '' : ` This layer has ${size} tokens, at a different resolution.`;
  const most = short(Math.sign(strongestOf(map.overview())) * largest);
  const held = map.whole
    ? 'Values of the map are rounded to 1/127 of the largest value in their row.'
    : `This file has the ${kept} strongest of ${size} entries in each row of a map, rounded to 1/127 of the largest. Bars show only these entries. Their share of a row's absolute sum is ${keptShares(map)}.`;
  return [`Layer ${index}: rows are receiving tokens, columns are source tokens. The strongest entry is ${most}. Shades are square roots.${pooled}${fits}`, held];
}

/** Return the mean and the least stored share of rows. */
function keptShares(map) {
  const all = Array.from({ length: map.size }, (_, i) => map.share(i));
  const mean = all.reduce((sum, x) => sum + x, 0) / all.length;
  return `${percent(mean)} on average and ${percent(Math.min(...all))} at least`;
}
