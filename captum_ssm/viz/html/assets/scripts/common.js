'use strict';

/* Code of all pages: elements, tokens, keys, colors of values, and the theme. */

/** Texts with more tokens than this show sentences and square roots. */
const LONG = 100;

const byId = (id) => document.getElementById(id);

/** The page's data blocks as bytes by id, and the block of facts. */
const BLOCKS = {};
let FACTS = null;

/** Unpack the data, which page.py packed, and begin; maps follow, one by one, and then `maps` is called. */
async function unpack(begin, maps = () => {}) {
  const unpacked = async ({ id, textContent }) => {
    const text = atob(textContent);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
    BLOCKS[id] = new Uint8Array(await new Response(plain).arrayBuffer());
  };
  const blocks = [...document.querySelectorAll('[type="application/octet-stream"]')];
  const late = blocks.filter(({ id }) => id.startsWith('map-'));
  await Promise.all(blocks.filter((block) => !late.includes(block)).map(unpacked));
  if (BLOCKS.facts) FACTS = JSON.parse(new TextDecoder().decode(BLOCKS.facts));
  const main = document.querySelector('main');
  if (!late.length) main.removeAttribute('aria-busy');
  begin();
  if (!late.length) return;
  for (const block of late) await unpacked(block);
  maps();
  main.removeAttribute('aria-busy');
}

/** Make an element with properties and children; strings become text, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

/** Write a sentence on the sum of a method's relevance, if its sum is known. */
function sumToldOf({ sum }) {
  return sum ? [make('span', { className: sum.adds_up ? 'sum' : 'sum off' }, sum.told)] : [];
}

/** Make the element of a token. */
function makeToken(title, ...content) {
  return make('span', { className: 'token', title }, ...content);
}

/** Tokens in lines: Tab focuses one of them, and arrow keys move the focus. */
class TokenLines {
  constructor(direction) {
    this.direction = direction;
    this.elements = [];
    this.reachable = 0;
  }

  /** Add a token that works as a button. */
  add(label, title) {
    const element = makeToken(title, label);
    element.dataset.index = this.elements.length;
    element.dir = 'auto';
    element.tabIndex = -1;
    element.setAttribute('role', 'button');
    element.setAttribute('aria-pressed', 'false');
    this.elements.push(element);
  }

  /** Remove gaps within words, and mark special tokens. */
  join(joined, marks) {
    for (const index of joined) this.elements[index].classList.add('joined');
    for (const index of marks) this.elements[index].classList.add('mark');
  }

  /** Lay tokens out in lines; copied text has spaces, and no word is broken. */
  lay(indices, joined, breaks) {
    const [glued, ends] = [new Set(joined), new Set(breaks)];
    const flow = make('div', { className: 'flow', dir: this.direction });
    for (const index of indices) {
      if (!glued.has(index)) flow.append(' ');
      flow.append(this.elements[index]);
      if (ends.has(index)) flow.append(make('br'));
    }
    return flow;
  }

  /** Move the focus by a key; return false for other keys. */
  go(key, index) {
    const last = this.elements.length - 1;
    const step = this.direction === 'rtl' ? -1 : 1;
    const places = {
      ArrowRight: () => index + step, ArrowLeft: () => index - step, Home: () => 0, End: () => last,
      ArrowDown: () => this.beside(index, 1), ArrowUp: () => this.beside(index, -1),
    };
    if (!Object.hasOwn(places, key)) return false;
    this.focus(Math.max(0, Math.min(last, places[key]())));
    return true;
  }

  /** Return the nearest token in the line above (-1) or below (1). */
  beside(index, step) {
    const from = this.elements[index].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let [best, distance, line] = [index, Infinity, null];
    for (let i = index + step; i >= 0 && i < this.elements.length; i += step) {
      const box = this.elements[i].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < box.height / 2) continue;
      if (line !== null && Math.abs(box.top - line) > box.height / 2) break;
      line = box.top;
      const apart = Math.abs(box.left + box.width / 2 - middle);
      if (apart < distance) [best, distance] = [i, apart];
    }
    return best;
  }

  /** Let Tab focus this token. */
  reach(index) {
    this.elements[this.reachable].tabIndex = -1;
    this.reachable = index;
    this.elements[index].tabIndex = 0;
  }

  /** Give a token the focus. */
  focus(index) {
    this.reach(index);
    this.elements[index].focus();
  }
}

/** Steps from no tint to the densest. */
const LEVELS = 64;

/** Return a value's background: purple above zero, brown below, denser if larger. */
function tint(value, largest) {
  if (!value || !largest) return '';
  const level = Math.round(Math.min(1, Math.abs(value) / largest) * LEVELS);
  if (level === 0) return '';
  return `rgb(var(${value > 0 ? '--more' : '--less'}) / calc(var(--densest) * ${level / LEVELS}))`;
}

/** Make a bar of a value that begins at `from`, on a scale from `low` to `high`. */
function bar(value, low, high, from = 0) {
  const made = make('span', { className: 'bar' });
  if (value && high > low) {
    const place = (end) => (100 * (Math.max(low, Math.min(high, end)) - low)) / (high - low);
    made.style.width = `${Math.abs(place(from + value) - place(from))}%`;
    made.style.marginInlineStart = `${place(from + Math.min(value, 0))}%`;
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
