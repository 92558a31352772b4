'use strict';

/* Relevance over images: patches, outlines of strong patches, or pixels. */

/** Forms of relevance over an image: names and notes. */
const MANNERS = {
  patches: ['patches', ''],
  outlines: ['outlines', 'The lines enclose the strongest patches, with half of the relevance.'],
  pixels: ['pixels', 'The color scale ends below the strongest few pixels.'],
};
/** The share of all relevance that lies inside outlines. */
const INSIDE = 0.5;
/** Steps from zero to the end of a raster's scale, and the code for no number. */
const RASTER_STEPS = 127;
const NO_STEP = -128;
/** The width of a line around patches, in pixels of the screen. */
const OUTLINE = 2;

/** Decode a raster: values by rows, and the end of the color scale. */
function cellsOf({ rows, columns, steps }) {
  const values = Float32Array.from(atob(steps), (character) => {
    const step = (character.charCodeAt(0) << 24) >> 24; // a byte with its sign
    return step === NO_STEP ? NaN : step;
  });
  return { rows, columns, values, largest: RASTER_STEPS };
}

/** The indices of the fewest cells that together hold a share of all relevance. */
function strongestShare(values, share) {
  const indices = [...values.keys()].filter((i) => values[i]); // neither 0 nor no number
  indices.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  let left = share * indices.reduce((sum, i) => sum + Math.abs(values[i]), 0);
  const kept = new Set();
  for (const i of indices) {
    if (left <= 0) break;
    kept.add(i);
    left -= Math.abs(values[i]);
  }
  return kept;
}

/** Return the border of some cells, inside of the cells; lines of neighbors meet. */
function borderOf(inside, { rows, columns }, cell, inset) {
  const border = new Path2D();
  const line = (x, y, toX, toY) => {
    border.moveTo(x, y);
    border.lineTo(toX, toY);
  };
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      if (!inside(row, column)) continue;
      const [above, below] = [inside(row - 1, column), inside(row + 1, column)];
      const [before, behind] = [inside(row, column - 1), inside(row, column + 1)];
      const left = column * cell + (before ? -inset : inset);
      const right = (column + 1) * cell + (behind ? inset : -inset);
      const top = row * cell + (above ? -inset : inset);
      const bottom = (row + 1) * cell + (below ? inset : -inset);
      if (!above) line(left, top, right, top);
      if (!below) line(left, bottom, right, bottom);
      if (!before) line(left, top, left, bottom);
      if (!behind) line(right, top, right, bottom);
    }
  }
  return border;
}

/** Paint outlines of the strongest cells, with a white halo for dark images. */
function paintOutlines(canvas, cells) {
  const { rows, columns, values } = cells;
  const kept = strongestShare(values, INSIDE);
  const scale = devicePixelRatio;
  const line = OUTLINE * scale;
  const cell = Math.max(3 * line, Math.round((canvas.clientWidth * scale) / columns));
  canvas.width = columns * cell;
  canvas.height = rows * cell;
  const context = canvas.getContext('2d');
  context.lineCap = 'square';
  const colors = palette('-on-image');
  for (const [sign, color] of [[1, colors.more], [-1, colors.less]]) {
    const inside = (row, column) => {
      const index = row * columns + column;
      const exists = row >= 0 && row < rows && column >= 0 && column < columns;
      return exists && kept.has(index) && Math.sign(values[index]) === sign;
    };
    const border = borderOf(inside, cells, cell, line);
    for (const [width, style] of [[2 * line, 'white'], [line, `rgb(${color.join(' ')})`]]) {
      context.lineWidth = width;
      context.strokeStyle = style;
      context.stroke(border);
    }
  }
}

/** The choice of a form of relevance over images; `changed` is called after each choice. */
class OverImages {
  constructor(holder, changed) {
    const { style, dataset } = document.documentElement;
    const options = Object.entries(MANNERS).map(([value, [name]]) => new Option(name, value));
    const list = make('select', {}, ...options);
    const share = getComputedStyle(document.documentElement).getPropertyValue('--overlay');
    const opacity = make('input', { type: 'range', min: 0, max: 100, value: 100 * share });
    this.note = make('p', { className: 'note' });
    holder.append(
      make('label', {}, 'Over the image', list),
      make('label', {}, 'Opacity', opacity),
      this.note,
    );
    opacity.addEventListener('input', () => style.setProperty('--overlay', opacity.value / 100));
    list.addEventListener('change', () => {
      dataset.manner = this.manner = list.value;
      changed();
    });
    dataset.manner = this.manner = list.value;
  }

  /** Paint relevance over an image: pixels if chosen and known, else patches. */
  paint(canvas, patches, pixels) {
    const cells = this.manner === 'pixels' && pixels ? cellsOf(pixels) : patches;
    const { values, rows, columns, largest } = cells;
    if (this.manner === 'outlines') paintOutlines(canvas, cells);
    else paintCells(canvas, values, columns, rows, largest, 1, palette('-on-image'));
  }

  /** Return the end of the color scale of painted pixels; else null. */
  endOf(pixels) {
    return this.manner === 'pixels' && pixels ? pixels.largest : null;
  }

  /** Show the form's note, or that there are no pixels. */
  tell(pixels = true) {
    const missing = this.manner === 'pixels' && !pixels;
    this.note.textContent = missing ? 'This relevance is only by patches.' : MANNERS[this.manner][1];
  }
}
