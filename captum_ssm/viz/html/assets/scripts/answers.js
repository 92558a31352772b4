'use strict';

/* Predictions to choose among, and the most relevant tokens for one. */

/** The number of listed tokens. */
const STRONGEST = 10;
/** The number of listed sentences of a long text. */
const SENTENCES = 3;

/** Make a chip with a radio button. */
function chip(name, value, checked, disabled, ...content) {
  const radio = make('input', { type: 'radio', name, value, checked, disabled });
  return make('label', { className: 'chip' }, radio, ...content);
}

const named = (label) => make('bdi', { className: 'name' }, label);

/** Show chips for the explained prediction and its contrast. */
function showChips({ predictions }, answer, against, switchable) {
  const [targets, rivals] = [byId('targets'), byId('rivals')];
  const legends = [targets, rivals].map((field) => field.querySelector('legend'));
  targets.hidden = !predictions.length;
  rivals.hidden = !switchable || predictions.length < 2;
  const chips = predictions.flatMap(({ label, probability, logit, rival }, index) => {
    if (rival && index !== answer) return [];
    const share = make('span', { className: 'share' }, percent(probability));
    const made = chip('target', index, index === answer, !switchable && index !== answer, named(label), share);
    made.title = `logit ${short(logit)}`;
    return [made];
  });
  targets.replaceChildren(legends[0], ...chips);
  // tokens of the text first: a question is often about one of them
  const order = predictions.map((_, index) => index).sort((a, b) => predictions[b].rival - predictions[a].rival);
  const others = order.filter((index) => index !== answer)
    .map((index) => chip('rival', index, index === against, false, named(predictions[index].label)));
  rivals.replaceChildren(legends[1], chip('rival', '', against === null, false, 'nothing'), ...others);
}

/** Describe the explained output. */
function explainedBy({ explained, predictions, asked }, answer, against) {
  if (answer === asked && against === null) return explained;
  const rival = against === null ? '' : ` minus the logit of “${predictions[against].label}”`;
  const [where] = explained.match(/, predicted after token \d+$/) ?? [''];
  return `the logit of “${predictions[answer].label}”${rival}${where}`;
}

/** Subtract two lists of numbers. */
function lessOf(values, others) {
  return values.map((value, index) => (value === null ? null : value - others[index]));
}

/** Return a method's relevance for an answer, for a difference of two, or for the original one. */
function saidBy(method, asked, answer, against) {
  const plain = answer === asked && against === null;
  const [one, other] = [method.answers[answer], method.answers[against]];
  const sum = plain ? method.sum : null; // the sum is of the original prediction
  if (!one) return { ...method, sum, astray: !plain };
  if (against === null) return { ...method, ...one, sum, ...(plain ? { values: method.values } : { pixels: null }), streams: [one.streams] };
  const names = new Set([...Object.keys(one.roles), ...Object.keys(other.roles)]);
  const none = one.values.map(() => 0);
  const role = (name) => lessOf(one.roles[name] ?? none, other.roles[name] ?? none);
  return {
    ...method,
    sum,
    pixels: null, // the page has pixels only for the original prediction
    values: lessOf(one.values, other.values),
    roles: Object.fromEntries([...names].map((name) => [name, role(name)])),
    output: one.output - other.output,
    bias: one.bias - other.bias,
    references: one.references - other.references,
    streams: [one.streams, other.streams],
  };
}

/** Write numbers with the decimals that suit the largest one. */
function alike(values) {
  const largest = largestOf(values);
  const digits = largest ? Math.max(0, Math.min(8, 2 - Math.floor(Math.log10(largest)))) : 0;
  return values.map((value) => value.toFixed(digits).replace(/^-(?=.*[1-9])/, '−').replace(/^-/, ''));
}

/** Sum names and values by word at each word's first token; later tokens get null. */
function wholeWords({ tokens, shards }, values) {
  const [names, sums] = [[...tokens], [...values]];
  for (const index of [...shards].reverse()) {
    names[index - 1] += /^[₀-₉]+$/.test(names[index]) ? '' : names[index];
    if (sums[index] !== null) sums[index - 1] += sums[index];
    sums[index] = null;
  }
  return { names, sums };
}

/** Return constants by name: references of the rule, and biases. */
function constantsOf({ bias, references }) {
  return references ? [['references', references], ['biases', bias - references]] : [['biases', bias]];
}

/** Write the sum of relevance as an equation. */
function equation(view, shades, what) {
  if (view.whole) {
    const [part, all] = alike([sumOf(shades), sumOf(view.whole.values)]);
    return `${view.name} ${part}, of ${all} in total`;
  }
  const tokens = sumOf(shades);
  if (view.output === undefined) return `Relevance sums to ${alike([tokens])[0]}.`;
  const parts = [['tokens', tokens], ...constantsOf(view)];
  const rest = view.output - view.bias - tokens;
  // such as tokens that the model puts in front of the text
  if (Math.abs(rest) > 5e-3 * largestOf([tokens, view.bias, view.output])) parts.push(['other inputs', rest]);
  const numbers = alike([...parts.map(([, value]) => value), view.output]);
  return `${parts.map(([name], i) => `${name} ${numbers[i]}`).join(' + ')} = ${what} ${numbers[parts.length]}`;
}

/** Show the strongest tokens as bars, and the total. */
function showStrongest(section, example, view, shades, what, astray) {
  const { names: tokens, sums: values } = wholeWords(example, shades);
  const best = strongest(values, STRONGEST);
  const shown = best.map((index) => values[index]);
  const ends = [Math.min(0, ...shown), Math.max(view.silent ? endOf(view) : 0, ...shown)];
  const row = (index) => {
    const token = make('button', { type: 'button', className: 'jump' }, make('bdi', {}, tokens[index]));
    token.dataset.index = index;
    token.setAttribute('aria-label', `Show token ${index} “${tokens[index]}”`);
    return make(
      'tr',
      {},
      make('td', { className: 'number' }, String(index)),
      make('td', { className: 'word' }, token),
      make('td', { className: 'scale' }, bar(values[index], ...ends)),
      make('td', { className: 'number' }, short(values[index])),
    );
  };
  const total = (name, value) =>
    make('tr', {}, make('th', { scope: 'row', colSpan: 3 }, name), make('td', { className: 'number' }, short(value)));
  const others = sumOf(values.filter((_, index) => !best.includes(index)));
  const left = values.filter((value) => value !== null).length - best.length;
  const kind = example.shards.length ? 'word' : 'token';
  const sums = left > 0 ? [total(left === 1 ? `One other ${kind}` : `${left} other ${kind}s`, others)] : [];
  if (view.output !== undefined && !view.whole) {
    sums.push(...constantsOf(view).map(([name, value]) => total(name[0].toUpperCase() + name.slice(1), value)));
    sums.push(total(`= ${what}`, view.output));
  }
  const table = section.querySelector('table');
  table.tBodies[0].replaceChildren(...best.map(row));
  table.tFoot.replaceChildren(...sums);
  byId('sum').textContent = equation(view, shades, what) + astray;
}

/** Show the most relevant sentences of a long text. */
function showSentences(list, { tokens, joined, sentences }, shades) {
  list.hidden = tokens.length <= LONG || sentences.length < 2;
  if (list.hidden) return;
  const glued = new Set(joined);
  const ends = [...sentences.slice(1), tokens.length];
  const sums = sentences.map((start, at) => sumOf(shades.slice(start, ends[at])));
  const rows = strongest(sums, SENTENCES).map((at) => {
    const inside = tokens.map((_, index) => index).slice(sentences[at], ends[at]);
    const [best] = strongest(shades.slice(sentences[at], ends[at]), 1);
    const most = largestOf(inside.map((index) => shades[index]));
    const words = inside.flatMap((index) => {
      const word = make('span', {}, tokens[index]);
      word.style.backgroundColor = tint(shades[index], most);
      return glued.has(index) ? [word] : [' ', word];
    });
    const button = make('button', { type: 'button', className: 'jump' }, make('bdi', {}, ...words));
    button.dataset.index = sentences[at] + (best ?? 0);
    return make('li', {}, make('b', { className: 'number' }, short(sums[at])), button);
  });
  list.querySelector('ol').replaceChildren(...rows);
}
