'use strict';

/* Small pictures of many numbers. */

/** Return the theme's colors as numbers, of a `kind` such as "-on-image". */
function palette(kind = '') {
  const style = getComputedStyle(document.documentElement);
  const numbers = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
  return { more: numbers(`--more${kind}`), less: numbers(`--less${kind}`) };
}

/** The color of missing numbers: gray. */
const NO_NUMBER = [128, 128, 128, 255];

/** Fill a canvas of width x height cells with values in rows; opaque is the largest. */
function paintCells(canvas, values, width, height, largest, densest = 0.9, colors = palette()) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext('2d');
  const image = context.createImageData(width, height);
  const { more, less } = colors;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (Number.isNaN(value)) image.data.set(NO_NUMBER, 4 * i);
    if (!value || !largest) continue;
    image.data.set(value > 0 ? more : less, 4 * i);
    image.data[4 * i + 3] = 255 * densest * Math.min(1, Math.abs(value) / largest);
  }
  context.putImageData(image, 0, 0);
}

/** The most cells of a strip; narrower cells would be invisible. */
const STRIP = 320;

/** Return the square root of a value's share, which makes weak values visible. */
const shadeOf = (value, largest) => Math.sign(value) * Math.sqrt(Math.abs(value) / (largest || 1));

/** Fill a canvas with a row of values, or with the strongest of several neighbors. */
function paintStrip(canvas, values, largest, roots) {
  const cell = Math.ceil(values.length / STRIP);
  const cells = [];
  for (let start = 0; start < values.length; start += cell) {
    cells.push(strongestOf(values.slice(start, start + cell)));
  }
  if (roots) paintCells(canvas, cells.map((value) => shadeOf(value, largest)), cells.length, 1, 1);
  else paintCells(canvas, cells, cells.length, 1, largest);
}

/** Return the index of the strongest value in the strip's cell below a pointer event. */
function stripIndex(canvas, event, values) {
  const cell = Math.ceil(values.length / STRIP);
  const start = cellAt(canvas, event, 1, Math.ceil(values.length / cell))[1] * cell;
  const [best] = strongest(values.slice(start, start + cell), 1);
  return start + (best ?? 0);
}
