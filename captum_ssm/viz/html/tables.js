/* Tables: predictions, partners of a token, and all numbers. */

/** How many partners of a token are named. */
const PARTNERS = 6;

/** Replace the rows of a table's body; a cell is text, a value (number or null), or {number}. */
function fillRows(body, rows) {
  body.replaceChildren(
    ...rows.map((cells) => {
      const row = make('tr');
      row.append(...cells.map(cellOf));
      return row;
    }),
  );
}

function cellOf(cell) {
  if (typeof cell === 'number' || cell === null) return make('td', 'number', short(cell));
  if (typeof cell === 'object') return make('td', 'number', String(cell.number));
  const element = make('td');
  element.append(make('bdi', '', cell));
  return element;
}

/** What the model says. */
function showPredictions(table, predictions) {
  table.hidden = predictions.length === 0;
  fillRows(
    table.tBodies[0],
    predictions.map((p) => [p.label, { number: percent(p.probability) }, p.logit]),
  );
}

/** The tokens with the largest values. */
function showPartners(table, tokens, values) {
  const best = strongest(values, PARTNERS);
  fillRows(
    table.tBodies[0],
    best.length ? best.map((i) => [{ number: i }, tokens[i], values[i]]) : [['none']],
  );
}

/** One row per token, one column per method. */
function numbersTable(example) {
  const table = make('table');
  table.append(make('caption', '', `Relevance of each token to ${example.explained}`));
  const head = make('tr');
  for (const name of ['Position', 'Token', ...example.methods.map((method) => method.name)]) {
    const cell = make('th', name === 'Token' ? '' : 'number', name);
    cell.scope = 'col';
    head.append(cell);
  }
  table.createTHead().append(head);
  fillRows(
    table.createTBody(),
    example.tokens.map((token, position) => [
      { number: position },
      token,
      ...example.methods.map((method) => method.values[position]),
    ]),
  );
  return table;
}
