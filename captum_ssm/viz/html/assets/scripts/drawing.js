'use strict';

/* Examples as elements. Strings from data or a model are set as text, never as markup. */

/** Characters that are invisible, or change the direction of others. */
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u115f\u1160\u3164\uffa0]/u;
const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/u;

/** Matches one character, or an emoji that joins several. */
const PICTURE = String.raw`\p{Extended_Pictographic}\ufe0f?`;
const CHARACTERS = new RegExp(`${PICTURE}(?:\u200d${PICTURE})*|[^]`, 'gu');

/** Split a text into pairs: a character, and true if it is written as an escape. */
function characters(text) {
  return (text.match(CHARACTERS) ?? []).map((c) => {
    const spell = UNSEEN.test(c) && Array.from(c).length === 1;
    return [spell ? `\\u{${c.codePointAt(0).toString(16)}}` : c, spell];
  });
}

/** Return a text with invisible characters as escapes. */
function readable(text) {
  return characters(text).map(([shown]) => shown).join('');
}

function written(text) {
  const spelled = (shown) => make('span', { className: 'spelled' }, shown);
  const parts = characters(text).map(([shown, spell]) => (spell ? spelled(shown) : shown));
  return parts.length ? parts : [spelled('(empty)')];
}

const number = (value) => (value === null ? 'not a number' : value.toFixed(3));

function rows(labels, percents) {
  return labels.map((label, i) => {
    const percent = percents[i] ?? null;
    return make(
      'tr',
      {},
      make('th', { scope: 'row', dir: 'auto' }, ...written(label)),
      make('td', { className: 'number' }, number(percent)),
      make('td', { className: 'scale' }, bar(percent, -100, 100)),
    );
  });
}

function table(labels, percents) {
  return make('table', {}, make('tbody', {}, ...rows(labels, percents)));
}

/** The pixels of a small image stay squares. */
const SMALL = 192;

function picture(png, alt) {
  const made = make('img', { alt });
  made.addEventListener('load', () => {
    made.classList.toggle('small', made.naturalWidth < SMALL);
  });
  made.src = `data:image/png;base64,${png}`;
  return made;
}

/** Make an image's overlay: relevance, or the picture of a custom feature. */
function overlay({ name, modified }, rasters) {
  const says = `${name}: relevance`;
  if (!Object.keys(rasters).length) {
    const made = picture(modified, says);
    made.classList.add('over');
    return made;
  }
  const canvas = make('canvas', { className: 'over' });
  canvas.setAttribute('role', 'img');
  canvas.setAttribute('aria-label', says);
  const { patches, pixels } = rasters;
  canvas.lay = () => overImages.paint(canvas, cellsOf(patches ?? pixels), pixels);
  canvas.told = Boolean(pixels);
  return canvas;
}

/** Return a text's words and layout; a list of words has no layout. */
function laidOut({ base }) {
  return Array.isArray(base) ? { labels: base, joined: [], breaks: [], marks: [] } : base;
}

/** Color words by percentages, without gaps within a word. */
function wordsOf(feature, percents, says) {
  const { labels, joined, breaks, marks } = laidOut(feature);
  const words = labels.map((word, i) => {
    const percent = percents[i] ?? null;
    const made = makeToken('', ...written(word));
    made.dataset.percent = number(percent);
    made.style.backgroundColor = tint(percent, 100);
    made.classList.toggle('unknown', percent === null);
    return made;
  });
  for (const i of joined) words[i].classList.add('joined');
  for (const i of marks) words[i].classList.add('mark');
  const isJoined = new Set(joined);
  const behind = labels.map((_, i) => (isJoined.has(i + 1) ? '' : ' ')); // in a copy, too
  for (const i of breaks) behind[i] = make('br');
  const spaced = words.flatMap((word, i) => [word, behind[i]]);
  const paragraph = make('p', { className: 'flow', tabIndex: 0 }, ...spaced);
  paragraph.setAttribute('role', 'group');
  paragraph.setAttribute('aria-label', `${says}: use the arrow keys to go from word to word`);
  if (RIGHT_TO_LEFT.test(labels.join(' '))) paragraph.dir = 'auto';
  return paragraph;
}

const FEATURES = {
  image(feature, rasters) {
    const base = () => picture(feature.base, `${feature.name}: the input`);
    const below = base();
    below.classList.add('under');
    const shown = [
      ['Input', base()],
      ['Relevance', make('div', { className: 'stack' }, below, overlay(feature, rasters))],
    ].map(([caption, image]) =>
      make('figure', {}, image, make('figcaption', {}, caption)),
    );
    return [make('div', { className: 'gallery' }, ...shown)];
  },
  text(feature) {
    const paragraph = wordsOf(feature, feature.modified, readable(feature.name));
    const numbers = make('details', {}, make('summary', {}, 'Numbers'));
    numbers.addEventListener(
      'toggle',
      () => {
        const scrolled = make('div', { className: 'numbers', tabIndex: 0 });
        scrolled.append(table(laidOut(feature).labels, feature.modified));
        numbers.append(scrolled);
      },
      { once: true },
    );
    return [paragraph, numbers];
  },
  general: (feature) => [table(feature.base, feature.modified)],
  empty: () => [],
};

function drawFeature(feature, rasters) {
  const draw = FEATURES[feature.type];
  const drawn = draw ? draw(feature, rasters) : [`This page cannot draw features of type ${feature.type}.`];
  return make('div', {}, make('h4', {}, readable(feature.name)), ...drawn);
}

/** Show the words of a text for each role, on one scale. */
function drawRoles({ roles, feature_outputs: [text] }) {
  const names = Object.keys(roles);
  if (!names.length) return [];
  const flows = names.map((role) => make('div', { className: 'role' }, make('h5', {}, role), wordsOf(text, roles[role], role)));
  return [make('details', {}, make('summary', {}, 'Relevance by role, same scale'), ...flows)];
}

function shares(features) {
  if (features.length < 2) return [];
  const names = features.map((feature) => feature.name);
  const percents = features.map((f) => (f.contribution === null ? null : 100 * f.contribution));
  return [make('h4', {}, 'Share of each input'), table(names, percents)];
}

function classButtons(output, { explain, known }) {
  const offered = [...output.predicted];
  const actual = output.actual;
  if (actual && !offered.some((score) => score.index === actual.index)) offered.push(actual);
  const buttons = offered.map((score, i) => {
    const label = i < output.predicted.length ? number(score.score) : 'label';
    const made = make('button', { type: 'button' }, `${readable(score.label)} (${label})`);
    made.dataset.index = score.index;
    made.setAttribute('aria-pressed', String(score.index === output.active_index));
    made.disabled = !known(score.index);
    made.addEventListener('click', () => explain(score.index));
    return made;
  });
  const group = make('div', { className: 'predicted' }, ...buttons);
  group.setAttribute('role', 'group');
  group.setAttribute('aria-label', 'Choose the class to explain');
  return group;
}

function verdict(output) {
  const best = output.predicted[0];
  if (!output.actual) return ', no label';
  if (!best) return '';
  return best.index === output.actual.index ? ', correct' : ', incorrect';
}

/** A choice among labels, by number. */
function choice(caption, labels, chosen) {
  const list = make('select', {}, ...labels.map((label, i) => new Option(`${i} ${readable(label)}`, i)));
  list.value = chosen;
  return [make('label', {}, caption, list), () => Number(list.value)];
}

/** Show the predictions without the cut messages. */
function drawCut({ answers, before: whole, without: rest, estimated, error }) {
  if (error !== undefined) return [make('p', { className: 'error' }, readable(error))];
  const head = make('thead', {}, make('tr', {}, ...['Probability', 'before', 'after'].map((name) => make('th', { scope: 'col' }, name)), make('td')));
  const body = answers.map(({ label, before, without }) => make('tr', {},
    make('th', { scope: 'row', dir: 'auto' }, readable(label)),
    ...[before, without].map((chance) => make('td', { className: 'number' }, number(chance))),
    make('td', { className: 'scale' }, bar(without, 0, 1))));
  const said = `The score of the explained class changes from ${number(whole)} to ${number(rest)}, by ${short(rest - whole)} (estimate ${short(-estimated)}).`;
  return [make('p', {}, said), ...(answers.length ? [make('table', {}, head, make('tbody', {}, ...body))] : [])];
}

/** Let the user cut the strongest messages, and any other by its ends and layer. */
function drawCutting(words, layers, { messages, cut }) {
  const last = words.length - 1;
  const [from, source] = choice('From', words, 0);
  const [to, target] = choice('To', words, last);
  const [layer, index] = choice('Layer', layers, layers.length - 1);
  const list = make('div', { className: 'predicted' });
  list.setAttribute('role', 'group');
  list.setAttribute('aria-label', 'Messages: press one to cut it, and again to restore it');
  const result = make('div', { className: 'result' });
  const known = new Map(); // by what a message is called, its button
  const run = async () => {
    const edges = [...known.values()].filter((button) => button.ariaPressed === 'true').map(({ edge }) => edge);
    if (!edges.length) {
      result.replaceChildren();
      return;
    }
    const answer = await cut({ edges });
    if (answer !== undefined) result.replaceChildren(...drawCut(answer));
  };
  const add = ({ name, source, target, effect, first_order: rough }) => {
    const layer = layers.indexOf(name);
    const said = `${readable(words[source] ?? String(source))} ${source} → ${readable(words[target] ?? String(target))} ${target}, layer ${layer}`;
    if (known.has(said)) return known.get(said);
    const estimate = effect === undefined ? '' : ` (${rough ? '≈ ' : ''}${short(-effect)})`;
    const button = make('button', { type: 'button', ariaPressed: 'false', edge: { name, source, target } }, said + estimate);
    button.addEventListener('click', () => {
      button.ariaPressed = String(button.ariaPressed === 'false');
      run();
    });
    known.set(said, button);
    list.append(button);
    return button;
  };
  const form = make('form', {}, from, to, layer, make('button', {}, 'Cut'));
  form.addEventListener('submit', (event) => {
    event.preventDefault();
    add({ name: layers[index()], source: source(), target: target() }).ariaPressed = 'true';
    run();
  });
  const note = 'The strongest messages between words, with their estimated effect on the score (≈: to first order). Press a message to cut it, and again to restore it.';
  const made = make('details', { className: 'cutting' }, make('summary', {}, 'Cut messages'), make('p', { className: 'note' }, note), list, result, form);
  made.addEventListener('toggle', async () => {
    const found = await messages();
    if (found?.error !== undefined) result.replaceChildren(...drawCut(found));
    found?.messages?.forEach(add);
  }, { once: true });
  return made;
}

/** Draw the attribution graph of the explained class when it is first opened. */
function drawWay(words, label, follow) {
  const holder = make('div', { className: 'graph' });
  const made = make('details', { className: 'way' }, make('summary', {}, 'Attribution graph'), holder);
  made.addEventListener('toggle', async () => {
    if (!made.open || holder.hasChildNodes()) return;
    const found = await follow();
    if (found === undefined) return;
    if (found.error !== undefined) {
      holder.replaceChildren(make('p', { className: 'error' }, readable(found.error)));
      return;
    }
    const fit = words.length === found.tokens; // else transforms made other tokens
    const tokens = fit ? words.map((word) => readable(word) || '∅') : Array.from({ length: found.tokens }, (_, i) => String(i));
    const direction = RIGHT_TO_LEFT.test(words.join(' ')) ? 'rtl' : 'ltr';
    showGraph(holder, { tokens, direction, explained: readable(label), graph: found.graph });
  });
  return made;
}

/** Show a method's explanation of an example, or the error. */
function drawMethod(output) {
  const title = output.method ? [make('p', { className: 'by note' }, readable(output.method))] : [];
  if (output.error !== undefined) {
    return make('div', {}, ...title, make('p', { className: 'error' }, readable(output.error)));
  }
  const features = output.feature_outputs.flatMap((feature, index) =>
    (feature.type === 'empty' ? [] : [drawFeature(feature, output.rasters[index])]));
  return make('div', {}, ...title, ...sumToldOf(output), ...shares(output.feature_outputs), ...features, ...drawRoles(output));
}

/** Show a model's prediction and each method's explanation; `answers` explains classes and cuts. */
function drawModel(outputs, title, layers, answers) {
  const made = make('section', {});
  const told = outputs.find((output) => output.error === undefined);
  made.append(make('h3', {}, told ? title + verdict(told) : title));
  if (!outputs.length) made.append(make('p', {}, 'This example does not pass the filter.'));
  if (told) made.append(classButtons(told, answers));
  made.append(make('div', { className: 'methods' }, ...outputs.map(drawMethod)));
  if (told && layers.length) {
    const words = laidOut(told.feature_outputs[0]).labels;
    const target = told.active_index;
    const explained = [...told.predicted, told.actual].find((score) => score && score.index === target);
    made.append(
      drawCutting(words, layers, {
        messages: () => answers.messages(target),
        cut: (edges) => answers.cut(target, edges),
      }),
      drawWay(words, explained ? explained.label : 'the output', () => answers.follow(target)),
    );
  }
  return made;
}

/** Show an example with a section for each model; `page` sends requests. */
function drawExample(example, models, page) {
  const labelled = example.models.find((output) => output.actual);
  const label = labelled ? `: ${readable(labelled.actual.label)}` : '';
  const sections = models.map(({ name, layers }, index) => {
    const title = models.length > 1 ? `Model ${index + 1}, ${name}` : name;
    const asked = { id: example.id, model: index };
    const draw = (outputs) => {
      const answers = {
        known: (target) => page.known({ ...asked, target }),
        messages: (target) => page.messages({ ...asked, target }),
        cut: (target, edges) => page.cut({ ...asked, target, ...edges }),
        follow: (target) => page.follow({ ...asked, target }),
        explain: async (target) => {
          const answer = await page.explain({ ...asked, target });
          if (answer === undefined) return;
          const renewed = draw(answer);
          section.replaceWith(renewed);
          page.drawn();
          renewed.querySelector('[aria-pressed="true"]')?.focus();
        },
      };
      const section = drawModel(outputs, title, layers, answers);
      section.setAttribute('aria-label', `Example ${example.number}, ${title}`);
      return section;
    };
    return draw(example.models.filter((output) => output.model_index === index));
  });
  return make(
    'article',
    {},
    make('h2', {}, `Example ${example.number}${label}`),
    make('div', { className: 'models' }, ...sections),
  );
}
