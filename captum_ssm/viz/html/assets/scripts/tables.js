'use strict';

/* Numbers and tables of numbers. */

/** Write a share in percent with one digit; shares near 0 or 1 get < or >. */
function percent(share) {
  if (share > 0 && share < 5e-4) return '< 0.1%';
  if (share < 1 && share > 0.9995) return '> 99.9%';
  return `${(100 * share).toFixed(1)}%`;
}

/** Write a number with few digits. */
function short(value) {
  if (value === null) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  const digits = size >= 1e-3 && size < 1e5 ? String(Number(value.toPrecision(3))) : value.toExponential(2);
  return (value > 0 ? '+' : '') + digits.replace('e+', 'e').replaceAll('-', '−');
}

/** The number of listed sources and receivers of a token. */
const PARTNERS = 6;

/** Replace the rows of a table's body; a cell is text, a value (number or null), or {number}. */
function fillRows(body, rows) {
  body.replaceChildren(
    ...rows.map((cells) => make('tr', {}, ...cells.map(cellOf))),
  );
}

function cellOf(cell) {
  const number = (text) => make('td', { className: 'number' }, text);
  if (typeof cell === 'number' || cell === null) return number(short(cell));
  if (typeof cell === 'object') return number(String(cell.number));
  return make('td', {}, make('bdi', {}, cell));
}

/** List the tokens with the largest values. */
function showPartners(table, tokens, values) {
  const best = strongest(values, PARTNERS);
  fillRows(
    table.tBodies[0],
    best.length ? best.map((i) => [{ number: i }, tokens[i], values[i]]) : [['none']],
  );
}

/** One row per token, one column per view: a method, or a role. */
function numbersTable(example, views) {
  const table = make('table');
  table.append(make('caption', {}, `Relevance of each token for ${example.explained}`));
  const head = make('tr');
  for (const name of ['Position', 'Token', ...views.map(titleOf)]) {
    const className = name === 'Token' ? '' : 'number';
    head.append(make('th', { scope: 'col', className }, name));
  }
  table.createTHead().append(head);
  fillRows(
    table.createTBody(),
    example.tokens.map((token, position) => [
      { number: position },
      token,
      ...views.map((view) => view.values[position]),
    ]),
  );
  return table;
}
