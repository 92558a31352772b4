'use strict';

/* Answers, and the sources of their words and sentences; generated.py packs the rows. */

/** The integer that stands for the largest value of a row. */
const ROW_STEPS = 32767;
/** How many of the strongest words are listed. */
const LISTED = { prompt: 6, answer: 3 };
/** How many of the strongest words a sentence names. */
const NAMED = 3;

/** The chosen example and word ({side, index}, or null for the whole answer), and whether the word
 * is kept. */
const chosen = { example: 0, at: null, kept: false, stretch: 'words', shades: 'words', hops: 0 };
let panes = {};
let answer = null;

/** The relevance for each word of an answer, after each number of hops. */
class Answer {
  constructor({ prompt, answer, blocks, constants }) {
    this.features = prompt.labels.length;
    this.words = answer.labels.length;
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

  /** Sum the relevance for some words of the answer: of the prompt's words, and of the answer's. */
  due(words, hops) {
    const { largest, steps } = this.rows(hops);
    const length = this.features + this.words;
    const sum = new Float64Array(length);
    for (const word of words) {
      const unit = largest[word] / ROW_STEPS;
      for (let i = 0, at = word * length; i < length; i++, at++) sum[i] += steps[at] * unit;
    }
    return { prompt: sum.subarray(0, this.features), answer: sum.subarray(this.features) };
  }

  /** Return the relevance of some words for each word of the answer. */
  given(side, words, hops) {
    const { largest, steps } = this.rows(hops);
    const length = this.features + this.words;
    const start = side === 'prompt' ? 0 : this.features;
    return Float64Array.from({ length: this.words }, (_, word) =>
      words.reduce((sum, i) => sum + (steps[word * length + start + i] * largest[word]) / ROW_STEPS, 0),
    );
  }

  /** Sum the constants of some words of the answer. */
  fixed(words, hops) {
    return this.constants && words.reduce((sum, word) => sum + this.constants[hops][word], 0);
  }
}

/** Return the chosen word, or its sentence. */
function lookedAt({ side, index }) {
  return chosen.stretch === 'sentences' && panes[side].hasSentences ? panes[side].sentenceOf(index) : [index];
}

/** Replace each value by its sentence's sum, if sentences are colored. */
function bySentence(pane, values) {
  if (chosen.shades !== 'sentences' || !pane.hasSentences) return values;
  const sums = [];
  values.forEach((value, i) => {
    sums[pane.sentences[i]] = (sums[pane.sentences[i]] || 0) + value;
  });
  return values.map((_, i) => sums[pane.sentences[i]]);
}

function act(kind, side, index) {
  const same = chosen.at && chosen.at.side === side && chosen.at.index === index;
  if (kind === 'point') {
    if (chosen.kept) {
      sayPair(side, index);
      return;
    }
    if (same) return;
    chosen.at = { side, index };
  } else {
    chosen.kept = !(chosen.kept && same);
    chosen.at = { side, index };
  }
  show();
}

/** Release the kept word, or clear the choice if no word is kept. */
function letGo() {
  if (!chosen.kept) chosen.at = null;
  chosen.kept = false;
  show();
}

/** Show colors, list and sentence for the choice. */
function show() {
  const { at, hops } = chosen;
  const back = at && at.side === 'prompt';
  const all = panes.answer.labels.map((_, i) => i);
  const words = at ? lookedAt(at) : all;
  const values = back
    ? { prompt: null, answer: answer.given('prompt', words, hops) }
    : answer.due(words, hops);
  const shades = {};
  for (const side of ['prompt', 'answer']) shades[side] = values[side] && bySentence(panes[side], values[side]);
  const largest = Math.max(...Object.values(shades).map((x) => (x ? largestOf(x) : 0)));
  for (const side of ['prompt', 'answer']) {
    panes[side].paint(shades[side], largest, at && at.side === side ? words : [], chosen.kept);
  }
  byId('most').textContent = short(largest);
  byId('least').textContent = short(-largest);
  byId('strongest-title').textContent = back ? 'Adds most to' : 'Depends most on';
  const best = listed(shades, largest);
  byId('status').replaceChildren(...sentence(at, words, best, back));
  byId('shown').textContent = back
    ? 'Background of the answer: how much the chosen part of the prompt adds to it.'
    : 'Background: relevance for the chosen part of the answer.';
  sayOneSum(values, words, back);
  showNumbers(values);
}

/** List the strongest words or sentences; return them. */
function listed(shades, largest) {
  const found = [];
  for (const side of ['prompt', 'answer']) {
    if (!shades[side]) continue;
    const pane = panes[side];
    const whole = chosen.shades === 'sentences' && pane.hasSentences;
    const seen = new Set();
    for (const index of strongest(shades[side], whole ? pane.labels.length : LISTED[side])) {
      if (whole && seen.has(pane.sentences[index])) continue;
      seen.add(pane.sentences[index]);
      const text = pane.read(whole ? pane.sentenceOf(index) : [index]);
      found.push({ side, index: whole ? pane.sentenceOf(index)[0] : index, text, value: shades[side][index] });
    }
  }
  // the prompt first: users ask for it
  const best = ['prompt', 'answer'].flatMap((side) => found.filter((each) => each.side === side).slice(0, LISTED[side]));
  byId('strongest').replaceChildren(
    ...best.map(({ side, index, text, value }) => {
      const bar = make('span', { className: 'bar' });
      bar.style.width = `${(100 * Math.abs(value)) / largest}%`;
      bar.style.backgroundColor = tint(value, Math.abs(value));
      const where = make('span', { className: 'from' }, side === 'prompt' ? ' in the prompt' : ' in the answer');
      const name = make('bdi', { title: text }, text, where);
      const button = make('button', { type: 'button' }, name, bar, make('span', { className: 'number' }, short(value)));
      button.addEventListener('click', () => panes[side].find(index));
      return make('li', {}, button);
    }),
  );
  return best;
}

/** Describe the choice. */
function sentence(at, words, best, back) {
  const said = [];
  const say = (text) => said.push(document.createTextNode(text));
  const quote = (text) => {
    say('“');
    said.push(make('bdi', { className: 'name' }, text));
    say('”');
  };
  if (at) quote(panes[at.side].read(words));
  else say('The whole answer');
  say(chosen.kept ? ' (selected)' : '');
  say(back ? ' adds most to ' : ' depends most on ');
  best.slice(0, NAMED).forEach(({ text, value }, n) => {
    if (n) say(', ');
    quote(text);
    say(` ${short(value)}`);
  });
  if (!best.length) say('nothing');
  say('.');
  return said;
}

/** Describe how much one word adds to another. */
function sayPair(side, index) {
  const { at, hops } = chosen;
  const [from, to] = at.side === 'answer' ? [{ side, index }, at] : [at, { side, index }];
  if (to.side !== 'answer') return;
  const words = lookedAt(from);
  const given = answer.given(from.side, words, hops);
  const value = lookedAt(to).reduce((sum, word) => sum + given[word], 0);
  const quote = ({ side: where }, indices) => make('bdi', { className: 'name' }, panes[where].read(indices));
  byId('status').replaceChildren('“', quote(from, words), '” adds ', short(value), ' to “', quote(to, lookedAt(to)), '”.');
}

/** Show the sum of relevance. */
function sayOneSum(values, words, back) {
  const add = (x) => x.reduce((sum, value) => sum + value, 0);
  const fixed = answer.fixed(words, chosen.hops);
  if (back || fixed === null) {
    byId('sum').textContent = back ? `Sum over the whole answer: ${short(add(values.answer))}.` : '';
    return;
  }
  const parts = [add(values.prompt), add(values.answer), fixed];
  byId('sum').textContent = `Prompt ${short(parts[0])}, earlier words of the answer ${short(parts[1])}, constants ${short(parts[2])}: together ${short(add(parts))}.`;
}

/** Show all numbers of the choice. */
function showNumbers(values) {
  const holder = byId('numbers-table');
  if (!byId('numbers').open) {
    holder.replaceChildren();
    return;
  }
  const table = make('table');
  const head = ['Text', 'Number', 'Word', 'Relevance'].map((name) => make('th', { scope: 'col' }, name));
  table.createTHead().append(make('tr', {}, ...head));
  const rows = ['prompt', 'answer'].flatMap((side) =>
    values[side] ? Array.from(values[side], (value, i) => [side, { number: i }, panes[side].labels[i], value]) : [],
  );
  fillRows(table.createTBody(), rows);
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
  for (const side of ['prompt', 'answer']) panes[side] = new Pane(byId(side), example[side], side, act);
  byId('stretch').hidden = !panes.answer.hasSentences;
  byId('shades').hidden = !panes.prompt.hasSentences && !panes.answer.hasSentences;
  const most = example.blocks.length - 1;
  const long = example.prompt.labels.length + example.answer.labels.length > LONG;
  const shades = long && !byId('shades').hidden ? 'sentences' : 'words';
  document.querySelector(`#shades [value=${shades}]`).checked = true;
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
  for (const side of ['prompt', 'answer']) Pane.listen(byId(side), () => panes[side]);
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') letGo();
  });
  showExample();
  themeButton(byId('theme'));
}

unpack(begin);
