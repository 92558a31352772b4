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

/** Return the start and the end of a sum of relevance, with its other parts; null if unknown. */
function lineOf(view, shades, logit) {
  const { whole, output, sum, bias } = view;
  const flow = output !== undefined;
  if (whole || (!flow && !(sum?.adds_up && view.contrast === null && Number.isFinite(logit)))) return null;
  const end = flow ? output : logit;
  const start = flow ? bias : logit - sum.wanted;
  const from = !flow && sum.of.endsWith('baseline') ? 'baseline' : 'constants';
  const rest = end - start - sumOf(shades);
  // of flows, it is from tokens that the model puts in front of the text
  const seen = Math.abs(rest) > 5e-3 * largestOf([end, start, end - start - rest]);
  return { start, end, from, rest: seen ? [[flow ? 'Other inputs' : 'Not explained', rest]] : [] };
}

/** Say in words how relevance leads to the output. */
function toldSum(view, shades, what, line) {
  const tokens = sumOf(shades);
  if (view.whole) {
    const [part, all] = alike([tokens, sumOf(view.whole.values)]);
    return `${view.name} ${part}, of ${all} in total`;
  }
  if (!line) return `Relevance sums to ${alike([tokens])[0]}.`;
  const parts = view.references ? constantsOf(view) : [];
  const values = [line.start, tokens, line.end, ...line.rest.map(([, value]) => value), ...parts.map(([, value]) => value)];
  const [start, added, end, ...others] = alike(values);
  const rest = line.rest.map(([name], i) => ` ${name}: ${others[i]}.`).join('');
  const made = parts.map(([name], i) => `${name} ${others[line.rest.length + i]}`).join(', ');
  const from = line.from === 'baseline' ? 'the output for the baseline' : 'constants of the model and the method, which belong to no token';
  return `Start ${start}: ${from}${made && ` (${made})`}. Tokens add ${added}.${rest} End: ${what} ${end}.`;
}

/** Show the strongest tokens as bars, each from the end of the bar above if the sum is known. */
function showStrongest(section, example, view, shades, { what, logit, astray }) {
  const { names: tokens, sums: values } = wholeWords(example, shades);
  const line = lineOf(view, shades, logit);
  const best = strongest(values, STRONGEST);
  const left = values.filter((value) => value !== null).length - best.length;
  const kind = example.shards.length ? 'word' : 'token';
  const others = sumOf(values.filter((_, index) => !best.includes(index)));
  const rest = [...(left > 0 ? [[left === 1 ? `One other ${kind}` : `${left} other ${kind}s`, others]] : []), ...(line?.rest ?? [])];
  const steps = [...best.map((index) => values[index]), ...(line ? rest.map(([, value]) => value) : [])];
  const places = [line?.start ?? 0]; // where each bar begins, and the last one ends
  for (const step of steps) places.push(line ? places.at(-1) + step : 0);
  const reached = line ? places : [0, view.silent ? endOf(view) : 0, ...steps];
  const ends = [Math.min(...reached), Math.max(...reached)];
  const scale = (...content) => make('td', { className: 'scale' }, ...content);
  const number = (value) => make('td', { className: 'number' }, short(value));
  const row = (index, place) => {
    const token = make('button', { type: 'button', className: 'jump' }, make('bdi', {}, tokens[index]));
    token.dataset.index = index;
    token.setAttribute('aria-label', `Show token ${index} “${tokens[index]}”`);
    return make(
      'tr',
      {},
      make('td', { className: 'number' }, String(index)),
      make('td', { className: 'word' }, token),
      scale(bar(values[index], ...ends, places[place])),
      number(values[index]),
    );
  };
  const total = (name, value, ...content) => make('tr', {}, make('th', { scope: 'row', colSpan: 2 }, name), scale(...content), number(value));
  const tick = (value) => {
    const made = bar(ends[1] - ends[0], ...ends, value);
    made.classList.add('tick');
    return made;
  };
  const table = section.querySelector('table');
  const start = line ? [total(`Start (${line.from})`, line.start, tick(line.start))] : [];
  const end = line ? [total(`= ${what}`, line.end, tick(line.end))] : [];
  table.tHead.replaceChildren(...start);
  table.tBodies[0].replaceChildren(...best.map(row));
  table.tFoot.replaceChildren(
    ...rest.map(([name, value], i) => total(name, value, ...(line ? [bar(value, ...ends, places[best.length + i])] : []))),
    ...end,
  );
  byId('sum').textContent = toldSum(view, shades, what, line) + astray;
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
