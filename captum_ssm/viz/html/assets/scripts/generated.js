'use strict';

/* Answers, and the sources of their words and sentences; generated.py packs the rows. */

/** The integer that stands for the largest value of a row. */
const ROW_STEPS = 32767;
/** How many of the strongest words are listed. */
const LISTED = { prompt: 6, answer: 3 };
/** How many of the strongest words a sentence names. */
const NAMED = 3;
/** About how many arcs are drawn, the most, and the widths of the weakest and the strongest. */
const ARCS = { some: 6, most: 8, widths: [1.25, 6] };

/** The chosen example and word (null for the whole answer), and whether the word is kept. */
const chosen = { example: 0, at: null, kept: false, stretch: 'words', shades: 'words', hops: 0 };
let text = null;
let answer = null;

/** The relevance for each word of an answer, after each number of hops; words of the prompt come
 * first, then those of the answer.
 */
class Answer {
  constructor({ prompt, answer, blocks, constants }) {
    this.features = prompt.labels.length;
    this.words = answer.labels.length;
    this.length = this.features + this.words;
    this.blocks = blocks;
    this.constants = constants;
    this.read = [];
  }

  rows(hops) {
    if (!this.read[hops]) {
      const { buffer } = BLOCKS[this.blocks[hops]];
      const largest = new Float32Array(buffer, 0, this.words);
      this.read[hops] = { largest, steps: new Int16Array(buffer, 4 * this.words) };
    }
    return this.read[hops];
  }

  /** Return the relevance of a word for a word of the answer. */
  at(source, target, hops) {
    const { largest, steps } = this.rows(hops);
    const row = target - this.features;
    return (steps[row * this.length + source] * largest[row]) / ROW_STEPS;
  }

  /** Return the indices of the answer's words. */
  all() {
    return Array.from({ length: this.words }, (_, word) => this.features + word);
  }

  /** Sum the relevance of each word for some words of the answer. */
  due(targets, hops) {
    return Float64Array.from({ length: this.length }, (_, source) =>
      targets.reduce((sum, target) => sum + this.at(source, target, hops), 0));
  }

  /** Sum the relevance of some words for each word of the answer; 0 for the prompt. */
  given(sources, hops) {
    return Float64Array.from({ length: this.length }, (_, target) =>
      (target < this.features ? 0 : sources.reduce((sum, source) => sum + this.at(source, target, hops), 0)));
  }

  /** Sum the constants of some words of the answer. */
  fixed(words, hops) {
    return this.constants && words.reduce((sum, word) => sum + this.constants[hops][word - this.features], 0);
  }
}

/** The prompt and its answer as one text, with arcs between words. */
class Text extends Pane {
  constructor(holder, { prompt, answer }) {
    const size = prompt.labels.length;
    const after = (indices) => indices.map((index) => size + index);
    const both = (name) => [...prompt[name], ...after(answer[name])];
    const known = prompt.sentences.length || answer.sentences.length;
    const sentences = known ? [0, ...prompt.sentences.slice(1), size, ...after(answer.sentences.slice(1))] : [];
    const [joined, breaks] = [both('joined'), both('breaks')];
    const labels = [...prompt.labels, ...answer.labels];
    super(holder, { labels, joined, breaks, marks: both('marks'), direction: prompt.direction, sentences }, '', act);
    const part = (id, dir, from, to) => make('span', { id, dir }, ...this.lay([...labels.keys()].slice(from, to), joined, breaks).childNodes);
    this.svg = draw('svg', { class: 'arcs', 'aria-hidden': true });
    const answered = part('answer', answer.direction, size);
    answered.setAttribute('role', 'group');
    answered.setAttribute('aria-label', 'Answer');
    this.flow = make('div', { className: 'flow', dir: prompt.direction }, part('prompt', prompt.direction, 0, size), ' ', answered, this.svg);
    holder.replaceChildren(this.flow);
    this.arcs = [];
  }

  /** Draw arcs from sources to words of the answer. */
  draw(arcs = this.arcs) {
    this.arcs = arcs;
    const largest = largestOf(arcs.map(({ value }) => value));
    const [thin, thick] = ARCS.widths;
    const { offsetHeight: high } = this.elements[0];
    const room = parseFloat(getComputedStyle(this.flow).lineHeight) - high;
    const middle = ({ offsetLeft, offsetWidth }) => offsetLeft + offsetWidth / 2;
    this.svg.replaceChildren(...arcs.map(({ source, target, value }) => {
      const [from, to] = [this.elements[source], this.elements[target]];
      const wide = thin + (thick - thin) * Math.abs(value / largest);
      const half = 2 + wide / 2;
      const [x, end, top] = [middle(from), middle(to), to.offsetTop - 1];
      const beside = Math.abs(from.offsetTop - to.offsetTop) < high / 2;
      // above words of one line; else down from the source's line
      const y = beside ? top : from.offsetTop + from.offsetHeight;
      const bend = beside ? -(4 / 3) * (room - wide) * Math.min(1, 0.3 + Math.abs(end - x) / 400) : Math.max(room, (top - y) / 2);
      const path = `M${x} ${y}C${x} ${y + bend} ${end} ${top - Math.abs(bend)} ${end} ${top - 2 * half}`;
      const head = `M${end - half} ${top - 2 * half}h${2 * half}L${end} ${top}Z`;
      return draw('g', { class: value < 0 ? 'against' : '' }, draw('path', { d: path, 'stroke-width': wide }), draw('path', { d: head, class: 'head' }));
    }));
  }
}

const sideOf = (index) => (index < answer.features ? 'prompt' : 'answer');

/** Return the chosen word, or its sentence. */
function lookedAt(index) {
  return chosen.stretch === 'sentences' && text.hasSentences ? text.sentenceOf(index) : [index];
}

/** Replace each value by its sentence's sum, if sentences are colored. */
function bySentence(values) {
  if (chosen.shades !== 'sentences' || !text.hasSentences) return values;
  const sums = [];
  values.forEach((value, i) => {
    sums[text.sentences[i]] = (sums[text.sentences[i]] || 0) + value;
  });
  return values.map((_, i) => sums[text.sentences[i]]);
}

function act(kind, _, index) {
  const same = chosen.at === index;
  if (kind === 'point') {
    if (chosen.kept) {
      sayPair(index);
      return;
    }
    if (same) return;
  } else chosen.kept = !(chosen.kept && same);
  chosen.at = index;
  show();
}

/** Release the kept word, or clear the choice if no word is kept. */
function letGo() {
  if (!chosen.kept) chosen.at = null;
  chosen.kept = false;
  show();
}

/** Show colors, arcs, list and sentence for the choice. */
function show() {
  const { at, hops } = chosen;
  const back = at !== null && sideOf(at) === 'prompt';
  const words = at === null ? answer.all() : lookedAt(at);
  const values = back ? answer.given(words, hops) : answer.due(words, hops);
  const shades = bySentence(values);
  const largest = largestOf(shades);
  text.paint(shades, largest, at === null ? [] : words, chosen.kept);
  text.draw(strongestPairs(words, back));
  byId('most').textContent = short(largest);
  byId('least').textContent = short(-largest);
  byId('strongest-title').textContent = back ? 'Adds most to' : 'Depends most on';
  byId('status').replaceChildren(...sentence(words, listed(shades, largest), back));
  byId('shown').textContent = back
    ? 'Color and arcs: how much the chosen part of the prompt adds to the score of each word of the answer.'
    : 'Color and arcs: how much each word adds to the score of the chosen part of the answer.';
  sayOneSum(values, words, back);
  showNumbers(values, back);
}

/** Return the pairs with the largest relevance: a few for each word, and not many in total. */
function strongestPairs(words, back) {
  const each = Math.ceil(ARCS.some / words.length);
  const pairs = words.flatMap((word) => {
    const values = back ? answer.given([word], chosen.hops) : answer.due([word], chosen.hops);
    values[word] = 0;
    return strongest(values, each).map((other) => {
      const [source, target] = back ? [word, other] : [other, word];
      return { source, target, value: values[other] };
    });
  });
  return pairs.sort((one, other) => Math.abs(other.value) - Math.abs(one.value)).slice(0, ARCS.most);
}

/** List the strongest words or sentences, first of the prompt, because users ask for it. */
function listed(shades, largest) {
  const whole = chosen.shades === 'sentences' && text.hasSentences;
  const seen = new Set();
  const found = { prompt: [], answer: [] };
  for (const index of strongest(shades, shades.length)) {
    const [first] = whole ? text.sentenceOf(index) : [index];
    if (!seen.has(first)) found[sideOf(index)].push(first);
    seen.add(first);
  }
  const best = ['prompt', 'answer'].flatMap((side) => found[side].slice(0, LISTED[side]))
    .map((index) => ({ index, said: text.read(whole ? text.sentenceOf(index) : [index]), value: shades[index] }));
  byId('strongest').replaceChildren(
    ...best.map(({ index, said, value }) => {
      const bar = make('span', { className: 'bar' });
      bar.style.width = `${(100 * Math.abs(value)) / largest}%`;
      bar.style.backgroundColor = tint(value, Math.abs(value));
      const where = make('span', { className: 'from' }, ` in the ${sideOf(index)}`);
      const name = make('bdi', { title: said }, said, where);
      const button = make('button', { type: 'button' }, name, bar, make('span', { className: 'number' }, short(value)));
      button.addEventListener('click', () => text.find(index));
      return make('li', {}, button);
    }),
  );
  return best;
}

/** Return nodes for a text in quotes. */
const quoted = (said) => ['“', make('bdi', { className: 'name' }, said), '”'];

/** Describe the choice. */
function sentence(words, best, back) {
  const what = chosen.at === null ? ['The whole answer'] : quoted(text.read(words));
  const verb = `${chosen.kept ? ' (selected)' : ''} ${back ? 'adds' : 'depends'} most ${back ? 'to' : 'on'} `;
  const named = best.slice(0, NAMED).flatMap(({ said, value }, n) => [n ? ', ' : '', ...quoted(said), ` ${short(value)}`]);
  return [...what, verb, ...(best.length ? named : ['nothing']), '.'];
}

/** Describe how much one word adds to another. */
function sayPair(index) {
  const { at, hops } = chosen;
  const [from, to] = (sideOf(at) === 'answer' ? [index, at] : [at, index]).map(lookedAt);
  if (sideOf(to[0]) !== 'answer') return;
  const given = answer.given(from, hops);
  const value = to.reduce((sum, word) => sum + given[word], 0);
  byId('status').replaceChildren(...quoted(text.read(from)), ' adds ', short(value), ' to ', ...quoted(text.read(to)), '.');
}

/** Show the sum of relevance. */
function sayOneSum(values, words, back) {
  const fixed = answer.fixed(words, chosen.hops);
  if (back || fixed === null) {
    byId('sum').textContent = back ? `Sum over the whole answer: ${short(sumOf(values))}.` : '';
    return;
  }
  const [prompt, earlier] = [values.subarray(0, answer.features), values.subarray(answer.features)].map(sumOf);
  byId('sum').textContent = `The prompt adds ${short(prompt)}, earlier words of the answer ${short(earlier)}, and the model's constants, which belong to no word, ${short(fixed)}. Together they are the score, ${short(prompt + earlier + fixed)}.`;
}

/** Show all numbers of the choice. */
function showNumbers(values, back) {
  const holder = byId('numbers-table');
  if (!byId('numbers').open) {
    holder.replaceChildren();
    return;
  }
  const table = make('table');
  const head = ['Text', 'Number', 'Word', 'Relevance'].map((name) => make('th', { scope: 'col' }, name));
  table.createTHead().append(make('tr', {}, ...head));
  const first = (index) => (sideOf(index) === 'prompt' ? 0 : answer.features);
  const rows = Array.from(values, (value, i) => [sideOf(i), { number: i - first(i) }, text.labels[i], value]);
  fillRows(table.createTBody(), back ? rows.slice(answer.features) : rows);
  holder.replaceChildren(table);
}

/** Show how often relevance was passed on. */
function sayHops() {
  byId('hops-said').textContent = ['not at all', 'once'][chosen.hops] || `${chosen.hops} times`;
}

/** Show the chosen example. */
function showExample() {
  const example = FACTS.examples[chosen.example];
  answer = new Answer(example);
  text = new Text(byId('text'), example);
  byId('stretch').hidden = byId('shades').hidden = !text.hasSentences;
  const most = example.blocks.length - 1;
  const long = answer.length > LONG;
  const shades = long && !byId('shades').hidden ? 'sentences' : 'words';
  document.querySelector(`#shades [value=${shades}]`).checked = true;
  byId('text').classList.toggle('long', long);
  Object.assign(chosen, { at: null, kept: false, hops: most, shades });
  Object.assign(byId('hops'), { max: most, value: most });
  byId('following').hidden = most === 0;
  sayHops();
  show();
}

function begin() {
  byId('about').textContent = FACTS.about;
  byId('choice').hidden = FACTS.examples.length < 2;
  byId('example').append(...FACTS.examples.map(({ name }, index) => new Option(name, index)));
  byId('example').addEventListener('change', (event) => {
    chosen.example = Number(event.target.value);
    showExample();
  });
  for (const name of ['stretch', 'shades']) {
    byId(name).addEventListener('change', (event) => {
      chosen[name] = event.target.value;
      show();
    });
  }
  byId('hops').addEventListener('input', (event) => {
    chosen.hops = Number(event.target.value);
    sayHops();
    show();
  });
  byId('whole').addEventListener('click', () => {
    Object.assign(chosen, { at: null, kept: false });
    show();
  });
  byId('numbers').addEventListener('toggle', show);
  Pane.listen(byId('text'), () => text);
  new ResizeObserver(() => text.draw()).observe(byId('text'));
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') letGo();
  });
  showExample();
  themeButton(byId('theme'));
}

unpack(begin);
