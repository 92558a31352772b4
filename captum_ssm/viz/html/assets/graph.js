'use strict';

/* The graph of an explained output: words below, a row for each layer, what is explained on top. */

/** Pixels between few rows, and between more than so many. */
const ROWS = [64, 44];
const MANY = 6;
/** Pixels around the picture, of a turned word's column, and of words left out. */
const MARGIN = 18;
const TURNED = 17;
const GAP = 9;
/** Words in a row take no more room than this; turned, no more than so many are shown. */
const LINE = 880;
const WORDS = 40;
/** Radii of the least and the most influential dot, and widths of the weakest and widest line. */
const RADII = [2.5, 8];
const WIDTHS = [0.75, 6];
/** Characters of a label. */
const LABEL = 16;
/** A picture that is too wide is made smaller down to this share, and then scrolls. */
const LEAST = 0.8;

function draw(tag, attributes, ...children) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const cutLabel = (text) => {
  const letters = Array.from(text);
  return letters.length > LABEL ? `${letters.slice(0, LABEL - 1).join('')}…` : text;
};

const rowName = (module) => module.split('.').slice(-2).join('.');

/** A function that says how wide a label is. */
function ruler(element) {
  const context = make('canvas').getContext('2d');
  context.font = `12px ${getComputedStyle(element).fontFamily}`;
  return (text) => context.measureText(text).width;
}

/** Where words stand: all in a row, or turned, those that have nodes and their neighbours. */
function columnsOf(tokens, columns, wide) {
  const names = tokens.map(cutLabel);
  const widths = names.map((name) => Math.max(24, wide(name) + 12));
  const turned = widths.reduce((sum, x) => sum + x, 0) > LINE;
  let kept = tokens.map((_, index) => index);
  if (turned) {
    const ends = [...new Set(columns)];
    const far = kept.map((index) => Math.min(...ends.map((end) => Math.abs(end - index))));
    kept = kept.sort((a, b) => far[a] - far[b] || a - b).slice(0, Math.max(WORDS, ends.length));
    kept.sort((a, b) => a - b);
  }
  const middles = new Map();
  const words = [];
  let end = 0;
  let before = -1;
  const place = (text, width) => {
    words.push({ text, x: end + width / 2 });
    end += width;
  };
  for (const index of kept) {
    if (index > before + 1) place('⋮', GAP);
    place(names[index], turned ? TURNED : widths[index]);
    middles.set(index, words[words.length - 1].x);
    before = index;
  }
  if (before < tokens.length - 1) place('⋮', GAP);
  return { middles, words, turned, width: end };
}

/** A place of the graph in words. */
function placeOf({ kind, position }, row, tokens) {
  const at = position === null ? '' : `token ${position} “${tokens[position]}”`;
  if (kind === 'token') return at;
  return kind === 'target' ? 'what is explained' : `${row} at ${at}`;
}

/** The picture as SVG. */
function graphPicture({ tokens, direction, explained, graph }, wide) {
  const { rows, nodes, links } = graph;
  const column = ({ position }) => (position === null ? tokens.length - 1 : position);
  const { middles, words, turned, width } = columnsOf(tokens, nodes.map(column), wide);
  const names = ['words', ...rows.map((module) => cutLabel(rowName(module))), 'explained'];
  const left = Math.max(...names.map(wide)) + MARGIN;
  const across = (x) => left + (direction === 'rtl' ? width - x : x);
  const apart = ROWS[rows.length > MANY ? 1 : 0];
  const height = apart * (names.length - 1) + 2 * MARGIN;
  const up = (row) => height - MARGIN - apart * row;
  const below = turned ? Math.max(...words.map(({ text }) => wide(text))) : 12;
  const size = { width: Math.ceil(left + width + MARGIN), height: Math.ceil(height + below + MARGIN) };
  const places = nodes.map((node) => ({ x: across(middles.get(column(node))), y: up(node.row) }));
  const said = nodes.map((node) => placeOf(node, rows[node.row - 1], tokens));
  const most = largestOf(links.map(({ carried }) => carried)) || 1;
  const top = largestOf(nodes.map(({ kind, influence }) => (kind === 'target' ? 0 : influence))) || 1;
  const lines = [...links]
    .sort((a, b) => a.carried - b.carried)
    .map(({ source, target, weight, carried }) => {
      const [{ x: x1, y: y1 }, { x: x2, y: y2 }] = [places[source], places[target]];
      const share = carried / most;
      const looks = {
        class: weight >= 0 ? 'adds' : 'takes',
        'stroke-width': WIDTHS[0] + (WIDTHS[1] - WIDTHS[0]) * share,
        'stroke-opacity': 0.3 + 0.65 * share,
      };
      const title = `${said[source]} adds ${short(weight)} to ${said[target]}`;
      return draw('line', { x1, y1, x2, y2, ...looks }, draw('title', {}, title));
    });
  const dots = nodes.map(({ kind, influence, value }, index) => {
    const share = kind === 'target' ? 1 : Math.min(1, influence / top);
    const radius = Math.sqrt(RADII[0] ** 2 + (RADII[1] ** 2 - RADII[0] ** 2) * share);
    const { x, y } = places[index];
    const adds = kind === 'whole' ? ` adds ${short(value)} to what is explained` : '';
    const title = `${said[index]}${adds}; ${percent(influence)} of the influence`;
    const looks = kind === 'error' ? 'hollow' : '';
    return draw('circle', { cx: x, cy: y, r: radius, class: looks }, draw('title', {}, title));
  });
  const labels = words.map(({ text, x }) => {
    const [at, y] = [across(x), height];
    const looks = turned
      ? { transform: `rotate(-90 ${at} ${y})`, 'text-anchor': 'end', dy: '0.35em' } // read upwards
      : { 'text-anchor': 'middle', dy: '0.8em' };
    return draw('text', { x: at, y, ...looks }, text);
  });
  const sides = names.map((text, row) => draw('text', { x: 0, y: up(row), dy: '0.35em', class: 'row' }, text));
  const label = `What adds to what on the way to ${explained}: ${nodes.length} dots, ${links.length} lines. The strongest path is in the table below.`;
  const looks = { role: 'img', 'aria-label': label, viewBox: `0 0 ${size.width} ${size.height}`, ...size };
  const made = draw('svg', looks, ...lines, ...dots, ...sides, ...labels);
  made.style.minWidth = `${LEAST * size.width}px`;
  return made;
}

/** What is drawn, in words. */
function graphNote({ rows, kind, places }) {
  const what = kind === 'blocks' ? 'a block of the model handed on' : 'a mixer returned';
  const some = rows.length < places ? ` Of ${places} ${kind}, ${rows.length} are rows, taken evenly; the way runs through the others too.` : '';
  return `A dot is a word, or all that ${what} at that word; the larger it is, the more of the output runs through it. A line is what the one adds to the next: purple adds, brown takes off. Those that add most are followed down to what they are made of; hollow ones are not.${some} Hold the pointer over a dot or a line to see its number.`;
}

/** The graph and its strongest path, or why there is none. */
function showGraph(section, example) {
  const { tokens, graph } = example;
  const { rows, nodes, path, obstacle } = graph;
  const part = (name) => section.querySelector(name);
  section.hidden = !nodes.length && obstacle === null;
  part('.obstacle').hidden = obstacle === null;
  part('.obstacle').textContent = `There is no graph: ${obstacle}`;
  part('.drawn').hidden = !nodes.length;
  if (!nodes.length) return;
  part('.picture').replaceChildren(graphPicture(example, ruler(section)));
  part('.drawn .note').textContent = graphNote(graph);
  part('table').hidden = !path.length;
  fillRows(
    part('tbody'),
    path.map(({ node, adds }) => {
      const { row, position } = nodes[node];
      return [row ? rows[row - 1] : 'the word itself', { number: position }, tokens[position], adds];
    }),
  );
}
