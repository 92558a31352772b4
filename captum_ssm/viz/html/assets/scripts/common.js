'use strict';

/* What the report and Insights share: elements, tokens, colours of values, and the theme. */

const byId = (id) => document.getElementById(id);

/** An element with properties, and texts or elements in it; never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** A token of a text. */
function makeToken(title, ...content) {
  return make('span', { className: 'token', title }, ...content);
}

/** Steps from no tint to the densest. */
const LEVELS = 64;

/** A background for a value: purple above zero, brown below, the denser the larger. */
function tint(value, largest) {
  if (!value || !largest) return '';
  const level = Math.round(Math.min(1, Math.abs(value) / largest) * LEVELS);
  if (level === 0) return '';
  return `rgb(var(${value > 0 ? '--more' : '--less'}) / calc(var(--densest) * ${level / LEVELS}))`;
}

/** The bar of a value, from zero to it, on a scale from what is lowest to what is highest. */
function bar(value, low, high) {
  const made = make('span', { className: 'bar' });
  if (value && high > low) {
    const place = (end) => (100 * (Math.max(low, Math.min(high, end)) - low)) / (high - low);
    made.style.width = `${Math.abs(place(value) - place(0))}%`;
    made.style.marginInlineStart = `${place(Math.min(value, 0))}%`;
    made.style.backgroundColor = tint(Math.sign(value), 1);
  }
  return made;
}

/** A button that goes from the system's theme to the other one, on to the system's by its name,
 * and back to following the system; `changed` is called after each change, and at once.
 */
function themeButton(button, changed = () => {}) {
  const { dataset } = document.documentElement;
  const system = matchMedia('(prefers-color-scheme: dark)');
  let theme = 'automatic';
  const show = () => {
    if (theme === 'automatic') delete dataset.theme;
    else dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    changed();
  };
  button.addEventListener('click', () => {
    const [own, other] = system.matches ? ['dark', 'light'] : ['light', 'dark'];
    theme = { automatic: other, [other]: own, [own]: 'automatic' }[theme];
    show();
  });
  system.addEventListener('change', show);
  show();
}
