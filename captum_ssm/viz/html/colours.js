/* Colours: the theme, tints of tokens, and small pictures of many numbers. */

/** The most opaque a tint may be, so that text on it stays readable. */
const DENSEST = 0.62;
const LEVELS = 64;

/** A background for a value: purple above zero, brown below, the denser the larger. */
function tint(value, largest) {
  if (!value || !largest) return '';
  const level = Math.round(Math.min(1, Math.abs(value) / largest) * LEVELS);
  if (level === 0) return '';
  return `rgb(var(${value > 0 ? '--more' : '--less'}) / ${(level / LEVELS) * DENSEST})`;
}

/** The theme's colours as numbers, for canvases. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const numbers = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
  return { more: numbers('--more'), less: numbers('--less') };
}

/** Fill a canvas of width x height cells with values in rows; opaque is the largest. */
function paintCells(canvas, values, width, height, largest, densest = 0.9) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext('2d');
  const image = context.createImageData(width, height);
  const { more, less } = palette();
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!value || !largest) continue;
    image.data.set(value > 0 ? more : less, 4 * i);
    image.data[4 * i + 3] = 255 * densest * Math.min(1, Math.abs(value) / largest);
  }
  context.putImageData(image, 0, 0);
}

/** Cells that a strip has at most; narrower ones would not be seen. */
const STRIP = 320;

/** Fill a canvas with a row of values, the strongest of neighbours where there are many. */
function paintStrip(canvas, values, largest) {
  const cell = Math.ceil(values.length / STRIP);
  const cells = [];
  for (let start = 0; start < values.length; start += cell) {
    cells.push(strongestOf(values.slice(start, start + cell)));
  }
  paintCells(canvas, cells, cells.length, 1, largest);
}

/** A button that switches between the system's theme and the other one. */
function themeButton(button, changed) {
  const root = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  const isDark = () => (root.dataset.theme || (system.matches ? 'dark' : 'light')) === 'dark';
  const say = () => {
    button.textContent = isDark() ? 'Light colours' : 'Dark colours';
    changed();
  };
  button.addEventListener('click', () => {
    root.dataset.theme = isDark() ? 'light' : 'dark';
    say();
  });
  system.addEventListener('change', say);
  say();
}

/** A share in percent, with one digit; what would round to nothing or to all is told apart. */
function percent(share) {
  if (share > 0 && share < 5e-4) return '< 0.1%';
  if (share < 1 && share > 0.9995) return '> 99.9%';
  return `${(100 * share).toFixed(1)}%`;
}

/** A number in few digits. */
function short(value) {
  if (value === null) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  const digits = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
  return (value > 0 ? '+' : '') + digits.replace('e+', 'e').replaceAll('-', '−');
}
