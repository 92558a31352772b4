'use strict';

/* The attribution graph: tokens below, a row for each layer, the explained output on top. */

/** Pixels between few rows, and between more than MANY rows. */
const ROWS = [64, 44];
const MANY = 6;
/** Pixels of the margin, of a rotated word's column, and of omitted words. */
const MARGIN = 18;
const TURNED = 17;
const GAP = 9;
/** The widest row of words, and the most words that are shown if they are rotated. */
const LINE = 880;
const WORDS = 40;
/** Radii of the weakest and strongest dot, and of the area to click; widths of lines. */
const RADII = [2.5, 8];
const HIT = 11;
const WIDTHS = [0.75, 7];
/** The most characters of a label. */
const LABEL = 16;
/** A wide picture shrinks down to this share, and then scrolls. */
const LEAST = 0.8;
/** A narrow picture is stretched up to this factor. */
const MOST_SPREAD = 2.2;
/** The number of lines at first, and of a dot's parts in the table. */
const LINES = 60;
const PARTS = 8;

const cutLabel = (text) => {
  const letters = Array.from(text);
  return letters.length > LABEL ? `${letters.slice(0, LABEL - 1).join('')}…` : text;
};

const rowName = (module) => module.split('.').slice(-2).join('.');

/** Return a function that measures a label's width. */
function ruler(element) {
  const context = make('canvas').getContext('2d');
  context.font = `12px ${getComputedStyle(element).fontFamily}`;
  return (text) => context.measureText(text).width;
}

/** Place the words in a row; rotate them if there are many, and keep those near nodes. */
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

/** Describe the graph. */
function graphNote({ rows, kind, places, how }) {
  const what = kind === 'blocks' ? 'block' : 'mixer';
  const some = rows.length < places ? ` The rows are ${rows.length} of ${places} ${kind}, ${how}. Relevance also passes through the others.` : '';
  return `Each dot is an input token, or the output of a ${what} at a token. Each line shows how much one dot adds to the next: purple adds, brown subtracts, and wider lines add more. The strongest dots are split into parts; hollow dots are not.${some} Click a dot to see only its parts. Use the arrow keys to go from dot to dot.`;
}

/** The graph of an example: a picture, and a table of the chosen dot's parts. */
class Flow {
  constructor(holder, example) {
    this.holder = holder;
    this.example = example;
    Object.assign(this, example.graph);
    this.target = this.nodes.length - 1;
    this.chosen = null;
    this.reachable = this.target;
    this.said = this.nodes.map((node) => this.placeOf(node));
    const sizes = this.links.map(({ weight }) => Math.abs(weight)).sort((a, b) => b - a);
    this.largest = sizes[0] || 1;
    this.picture();
    const slider = this.part('input');
    const first = sizes.length > LINES ? Math.ceil(100 * Math.sqrt(sizes[LINES - 1] / this.largest)) : 0;
    slider.value = Math.min(100, first);
    slider.oninput = () => this.show();
    this.part('.whole').onclick = () => {
      this.choose(null);
      this.focus(this.reachable);
    };
    this.show();
  }

  part(name) {
    return this.holder.querySelector(name);
  }

  /** Name a node of the graph. */
  placeOf({ kind, row, position }) {
    const at = position === null ? '' : `token ${position} “${this.example.tokens[position]}”`;
    if (kind === 'token') return at;
    return kind === 'target' ? 'the explained output' : `${this.rows[row - 1]} at ${at}`;
  }

  /** Return the lines that end in a dot, strongest first. */
  into(index) {
    const found = this.links.filter(({ target }) => target === index);
    return found.sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
  }

  /** Draw the picture as SVG. */
  picture() {
    const { example, rows, nodes } = this;
    const { tokens, direction } = example;
    const wide = ruler(this.holder);
    const column = ({ position }) => (position === null ? tokens.length - 1 : position);
    const { middles, words, turned, width } = columnsOf(tokens, nodes.map(column), wide);
    const names = ['tokens', ...rows.map((module) => cutLabel(rowName(module))), 'output'];
    const left = Math.max(...names.map(wide)) + MARGIN;
    const room = (this.part('.picture').clientWidth - left - 2 * MARGIN) / width;
    const spread = turned ? 1 : Math.max(1, Math.min(MOST_SPREAD, room));
    const across = (x) => left + spread * (direction === 'rtl' ? width - x : x);
    const apart = ROWS[rows.length > MANY ? 1 : 0];
    const height = apart * (names.length - 1) + 2 * MARGIN;
    const up = (row) => height - MARGIN - apart * row;
    const below = turned ? Math.max(...words.map(({ text }) => wide(text))) : 12;
    const size = { width: Math.ceil(left + spread * width + MARGIN), height: Math.ceil(height + below + MARGIN) };
    this.places = nodes.map((node) => ({ x: across(middles.get(column(node))), y: up(node.row) }));
    this.lines = this.links.map((link) => this.line(link));
    this.dots = nodes.map((node, index) => this.dot(node, index));
    const steps = this.path.map(({ node }) => node);
    this.along = this.path.map(({ adds }, i) => {
      const [from, to] = [this.places[steps[i]], this.places[steps[i + 1] ?? this.target]];
      return draw('text', { x: (from.x + to.x) / 2 - 7, y: (from.y + to.y) / 2, dy: '0.35em', class: 'along' }, short(adds));
    });
    const weakest = this.links.map((_, i) => i).sort((a, b) => Math.abs(this.links[a].weight) - Math.abs(this.links[b].weight));
    const labels = words.map(({ text, x }) => {
      const [at, y] = [across(x), height];
      const looks = turned
        ? { transform: `rotate(-90 ${at} ${y})`, 'text-anchor': 'end', dy: '0.35em' } // read upwards
        : { 'text-anchor': 'middle', dy: '0.8em' };
      return draw('text', { x: at, y, ...looks }, text);
    });
    const sides = names.map((text, row) => draw('text', { x: 0, y: up(row), dy: '0.35em', class: 'row' }, text));
    const label = `Attribution graph of ${example.explained}: ${nodes.length} dots, ${this.links.length} lines. Use the arrow keys to move, Enter to see the parts of a dot, Escape to show all`;
    const looks = { role: 'group', 'aria-label': label, viewBox: `0 0 ${size.width} ${size.height}`, ...size };
    const made = draw('svg', looks, ...weakest.map((i) => this.lines[i]), ...this.dots, ...sides, ...labels, ...this.along);
    made.style.minWidth = `${LEAST * size.width}px`;
    this.listen(this.part('.picture'), made);
    this.reach(this.target);
  }

  /** Listen to pointer and keys on the dots. */
  listen(frame, made) {
    const around = make('div', {}, made); // a picture that listens itself could have the focus
    const at = (event) => this.dots.indexOf(event.target.closest('.dot'));
    const say = (event) => {
      if (at(event) >= 0) showTip(this.dots[at(event)].getBoundingClientRect(), [this.numberOf(at(event))]);
    };
    around.addEventListener('pointerover', say);
    around.addEventListener('focusin', (event) => {
      this.reach(at(event));
      if (event.target.matches(':focus-visible')) say(event);
    });
    for (const name of ['pointerout', 'focusout']) around.addEventListener(name, hideTip);
    around.addEventListener('click', (event) => {
      if (at(event) >= 0) this.choose(at(event) === this.chosen ? null : at(event));
    });
    around.addEventListener('keydown', (event) => {
      if (this.press(event.key, at(event))) event.preventDefault();
    });
    frame.replaceChildren(around);
  }

  line({ source, target, weight }) {
    const [{ x: x1, y: y1 }, { x: x2, y: y2 }] = [this.places[source], this.places[target]];
    const share = Math.abs(weight) / this.largest;
    const looks = {
      class: weight >= 0 ? 'adds' : 'takes',
      'stroke-width': WIDTHS[0] + (WIDTHS[1] - WIDTHS[0]) * share,
      'stroke-opacity': 0.35 + 0.6 * share,
    };
    const title = `${this.said[source]} adds ${short(weight)} to ${this.said[target]}`;
    return draw('line', { x1, y1, x2, y2, ...looks }, draw('title', {}, title));
  }

  dot({ kind, value }, index) {
    const share = kind === 'target' ? 1 : Math.min(1, Math.abs(value) / (largestOf(this.nodes.map((node) => node.value)) || 1));
    const radius = Math.sqrt(RADII[0] ** 2 + (RADII[1] ** 2 - RADII[0] ** 2) * share);
    const { x, y } = this.places[index];
    const looks = { class: 'dot', role: 'button', tabindex: -1, 'aria-label': this.numberOf(index), 'aria-pressed': 'false' };
    const hit = draw('circle', { cx: x, cy: y, r: HIT, class: 'hit' });
    return draw('g', looks, hit, draw('circle', { cx: x, cy: y, r: radius, class: kind === 'error' ? 'hollow' : 'full' }));
  }

  /** Describe a dot and its number. */
  numberOf(index) {
    const { kind, value } = this.nodes[index];
    if (kind === 'target') return `${this.said[index]}: ${short(value)}`;
    return `${this.said[index]} adds ${short(value)} to ${kind === 'whole' ? 'the explained output' : 'the dots above'}`;
  }

  /** Handle a key on a dot; return true if the key has an effect. */
  press(key, index) {
    if (index < 0) return false;
    if (key === 'Enter' || key === ' ') this.choose(index === this.chosen ? null : index);
    else if (key === 'Escape' && this.chosen !== null) this.choose(null);
    else if (!key.startsWith('Arrow')) return false;
    else this.focus(this.beside(index, key));
    return true;
  }

  /** The dot that lies nearest in the direction of an arrow key, or the same one. */
  beside(index, key) {
    const from = this.places[index];
    const upright = key === 'ArrowUp' || key === 'ArrowDown';
    const sign = key === 'ArrowUp' || key === 'ArrowLeft' ? -1 : 1;
    const along = ({ x, y }) => sign * (upright ? y - from.y : x - from.x);
    const aside = ({ x, y }) => Math.abs(upright ? x - from.x : y - from.y);
    const found = this.places
      .map((place, at) => ({ at, along: along(place), aside: aside(place) }))
      .filter(({ at, along: far, aside: off }) => far > 0.5 && (upright || off < 0.5) && !this.dots[at].matches('.hidden'));
    found.sort((a, b) => (upright ? a.along - b.along || a.aside - b.aside : a.along - b.along));
    return found.length ? found[0].at : index;
  }

  /** Let Tab focus this dot. */
  reach(index) {
    this.dots[this.reachable].setAttribute('tabindex', -1);
    this.reachable = index;
    this.dots[index].setAttribute('tabindex', 0);
  }

  focus(index) {
    this.reach(index);
    this.dots[index].focus();
  }

  /** Show only the parts of one dot; null for all dots. */
  choose(index) {
    this.chosen = index;
    this.show();
  }

  /** Draw the graph for the chosen dot and the smallest shown line. */
  show() {
    const { chosen } = this;
    const least = this.largest * (this.part('input').value / 100) ** 2;
    this.part('output').textContent = `${short(least).replace('+', '')} (${percent(least / (Math.abs(this.nodes[this.target].value) || 1))} of the output)`;
    const ends = new Set([this.target, chosen]);
    const parts = new Set([chosen]);
    this.links.forEach(({ source, target, weight }, i) => {
      const [own, seen] = [target === chosen, Math.abs(weight) >= least || target === chosen];
      if (seen) ends.add(source).add(target);
      if (own) parts.add(source);
      this.lines[i].classList.toggle('hidden', !seen);
      this.lines[i].classList.toggle('faint', chosen !== null && !own);
    });
    this.dots.forEach((dot, index) => {
      dot.classList.toggle('hidden', !ends.has(index));
      dot.classList.toggle('faint', chosen !== null && !parts.has(index));
      dot.setAttribute('aria-pressed', String(index === chosen));
    });
    if (!ends.has(this.reachable)) this.reach(this.target);
    this.part('.whole').hidden = chosen === null;
    this.showParts(chosen ?? this.target);
  }

  /** Show the table of a dot's parts, which sum to the dot. */
  showParts(index) {
    const { kind, value, constants } = this.nodes[index];
    const table = this.part('.parts');
    table.caption.textContent = `Parts of ${this.said[index]} (${short(value)})`;
    const links = this.into(index);
    const rows = links.slice(0, PARTS).map(({ source, weight }) => [this.sourceOf(source), weight]);
    if (kind === 'whole' || kind === 'target') {
      const rest = value - constants - sumOf(links.slice(0, PARTS).map(({ weight }) => weight));
      if (links.length > PARTS || Math.abs(rest) > 1e-4 * Math.abs(value)) rows.push(['All others', rest]);
      rows.push(['Biases', constants], ['Sum', value]);
    } else rows.push([kind === 'token' ? 'An input token has no parts.' : 'This dot was not split.', null]);
    table.tBodies[0].replaceChildren(
      ...rows.map(([name, number]) =>
        make('tr', {}, make('td', {}, name), make('td', { className: 'number' }, number === null ? '' : short(number))),
      ),
    );
  }

  /** Make a button for a part, or only its name if it has no parts. */
  sourceOf(index) {
    const name = make('bdi', {}, this.said[index]);
    if (this.nodes[index].kind !== 'whole') return name;
    const button = make('button', { type: 'button', className: 'jump' }, name);
    button.addEventListener('click', () => {
      this.choose(index);
      this.part('.whole').focus();
    });
    return button;
  }
}

/** Make a table's head; each column has a name and properties. */
function headOf(...columns) {
  const cells = columns.map(([text, looks]) => make('th', { scope: looks.colSpan ? 'colgroup' : 'col', ...looks }, text));
  return make('thead', {}, make('tr', {}, ...cells));
}

/** Make the graph's slider, picture and tables. */
function graphHolders() {
  const slider = make('input', { type: 'range', min: 0, max: 100 });
  const whole = make('button', { type: 'button', className: 'whole', hidden: true }, 'Show all');
  const parts = make('table', { className: 'parts' }, make('caption'), make('tbody'));
  const head = headOf(['Node', {}], ['At token', { colSpan: 2 }], ['Adds to the next', { className: 'number' }]);
  const caption = make('caption', {}, 'The strongest path to the explained output');
  const path = make('div', { className: 'path', tabIndex: 0 }, make('table', { className: 'strongest' }, caption, head, make('tbody')));
  path.setAttribute('role', 'group');
  path.setAttribute('aria-label', 'The strongest path');
  return [
    make('p', { className: 'smallest' }, make('label', {}, 'Show lines of at least ', slider), make('output'), whole),
    make('div', { className: 'pair' }, make('div', { className: 'picture' }), parts),
    make('p', { className: 'note' }),
    path,
  ];
}

/** Show an example's graph and its strongest path, or the reason for no graph. */
function showGraph(holder, example) {
  const { tokens, graph } = example;
  const { rows, nodes, path, obstacle } = graph;
  const none = obstacle === null ? [] : [make('p', { className: 'obstacle note' }, `There is no graph: ${obstacle}`)];
  holder.replaceChildren(...(nodes.length ? graphHolders() : none));
  if (!nodes.length) return;
  new Flow(holder, example);
  holder.querySelector('.note').textContent = graphNote(graph);
  const table = holder.querySelector('.strongest');
  table.hidden = !path.length;
  fillRows(
    table.tBodies[0],
    path.map(({ node, adds }) => {
      const { row, position } = nodes[node];
      return [row ? rows[row - 1] : 'input token', { number: position }, tokens[position], adds];
    }),
  );
}
