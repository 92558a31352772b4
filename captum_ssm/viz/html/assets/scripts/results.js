'use strict';

/* Results of methods: rows of colored tokens, maps, and sums. */

/** The chosen example and token, and whether the token is kept. */
const chosen = { example: 0, token: null, kept: false };
let panes = [];

const example = () => FACTS.examples[chosen.example];

function act(kind, row, token) {
  if (kind === 'point') {
    if (chosen.kept || chosen.token === token) return;
    chosen.token = token;
  } else {
    chosen.kept = !(chosen.kept && chosen.token === token);
    chosen.token = token;
  }
  showRows();
}

/** Color the rows, and show each row's number for the current token. */
function showRows() {
  const { rows, words } = example();
  const { token } = chosen;
  panes.forEach((pane, n) => {
    pane.paint(rows[n].values, rows[n].scale, token === null ? [] : [token], chosen.kept);
  });
  if (!rows.length) return;
  if (token === null) {
    byId('status').textContent = 'Point at a token, or use Tab and the arrow keys, to read its numbers.';
    return;
  }
  const said = rows.map(({ name, values }) => `${name} ${short(values[token])}`).join(', ');
  const quoted = make('bdi', {}, words.labels[token]);
  byId('status').replaceChildren(`Token ${token} “`, quoted, `”${chosen.kept ? ' (selected)' : ''}: ${said}.`);
}

/** Make a heading with the strongest value. */
function headed(name, strongest, note) {
  const scale = make('span', { className: 'scale' }, ` strongest ${short(strongest)}. ${note}`);
  return make('h2', {}, name, scale);
}

function makeRows() {
  const { rows, words } = example();
  panes = [];
  byId('rows').replaceChildren(
    ...rows.map(({ name, values, note, sum }, n) => {
      const holder = make('div', { className: 'pane' });
      holder.setAttribute('role', 'group');
      holder.setAttribute('aria-label', `${name}: use the arrow keys to move, Enter to select, Escape to clear`);
      panes.push(new Pane(holder, words, n, act));
      Pane.listen(holder, () => panes[n]);
      return make('section', {}, headed(name, strongestOf(values), note), ...sumToldOf({ sum }), holder);
    }),
  );
}

/** Paint pictures in the theme's colors. */
function paintPictures() {
  const { maps, layers } = example();
  byId('maps').replaceChildren(
    ...maps.map(({ name, size: [height, width], values }) => {
      const canvas = make('canvas');
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', `${name}: ${height} by ${width}`);
      paintCells(canvas, values, width, height, largestOf(values));
      return make('figure', {}, headed(name, strongestOf(values), ''), canvas);
    }),
  );
  byId('layers-part').hidden = layers.length < 2;
  if (layers.length < 2) return;
  const cells = layers.flat();
  paintCells(byId('layers'), cells, layers[0].length, layers.length, largestOf(cells));
  byId('layers').setAttribute('aria-label', `${layers.length} layers by ${layers[0].length} tokens`);
}

function showNumbers() {
  const { rows, words } = example();
  const holder = byId('numbers-table');
  holder.replaceChildren();
  if (!byId('numbers').open) return;
  const table = make('table');
  const head = ['Position', 'Token', ...rows.map(({ name }) => name)];
  table.createTHead().append(make('tr', {}, ...head.map((name) => make('th', { scope: 'col' }, name))));
  fillRows(
    table.createTBody(),
    words.labels.map((label, i) => [{ number: i }, label, ...rows.map(({ values }) => values[i])]),
  );
  holder.append(table);
}

function showExample() {
  const { rows, sum, biases } = example();
  Object.assign(chosen, { token: null, kept: false });
  byId('sum').hidden = sum === null;
  if (sum) {
    const parts = sum.parts.map(([name, value]) => `${name} ${short(value)}`).join(', ');
    byId('sum').textContent = `The output ${short(sum.output)} is the sum: ${parts}.`;
  }
  byId('status').hidden = byId('numbers').hidden = rows.length === 0;
  byId('biases').hidden = biases.length === 0;
  fillRows(byId('biases').querySelector('tbody'), biases);
  makeRows();
  showRows();
  paintPictures();
  showNumbers();
}

function begin() {
  byId('choice').hidden = FACTS.examples.length < 2;
  byId('example').append(...FACTS.examples.map(({ name }, index) => new Option(name, index)));
  byId('example').addEventListener('change', (event) => {
    chosen.example = Number(event.target.value);
    showExample();
  });
  byId('numbers').addEventListener('toggle', showNumbers);
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    if (!chosen.kept) chosen.token = null;
    chosen.kept = false;
    showRows();
  });
  showExample();
  themeButton(byId('theme'), paintPictures);
}

unpack(begin);
