'use strict';

/* The report's choices, and the parts of the page that depend on them. */

/** The chosen example, answer and contrast, method, map and layer, and the token that is pointed at
 * or kept. */
const chosen = { example: 0, answer: 0, against: null, method: 0, map: 0, layer: 0, pointed: null, kept: null };
let tokens = null;
let layers = [];
const overImages = new OverImages(byId('over-image'), () => {
  paintMethods();
  showOverImage();
  showLegend();
});
let entering = null;
let scissors = null;
/** Methods and roles that can color tokens, computed anew when the answer changes. */
let views = [];

const example = () => FACTS.examples[chosen.example];
const view = () => views[chosen.method];

/** The layer's map, if its rows belong to the tokens that are shown. */
function usableMap() {
  const map = layers[chosen.layer];
  return map && map.size === example().tokens.length ? map : null;
}

/** React to "point", "keep" or "jump" of a token, or "layer" with a step; `about` has the tooltip's
 * box and content if they differ from the token's.
 */
function act(kind, index, about = null) {
  if (kind === 'layer') {
    if (layers.length) chooseLayer(Math.max(0, Math.min(layers.length - 1, chosen.layer + index)));
    return;
  }
  if (kind === 'point') chosen.pointed = index;
  else if (kind === 'keep') chosen.kept = index === chosen.kept ? null : index;
  else {
    chosen.kept = index;
    chosen.pointed = null;
    tokens.reach(index);
    tokens.show(index);
    const count = zoom[1] - zoom[0];
    if (index < zoom[0] || index >= zoom[1]) {
      zoomTo(index - count / 2, index + count / 2);
      showZoomed();
    }
  }
  showTokens(about);
}

function chooseLayer(index) {
  chosen.layer = index;
  byId('thumbnails').querySelectorAll('input')[index].checked = true;
  showLayer();
}

/** List each method, followed by its roles, for the explained output. */
function findViews() {
  const { methods, asked } = example();
  views = methods.flatMap((method) => {
    const said = saidBy(method, asked, chosen.answer, chosen.against);
    const roles = Object.entries(said.roles);
    return [said, ...roles.map(([role, values]) => ({ name: role, values, own: null, whole: said }))];
  });
  chosen.method = Math.min(chosen.method, views.length - 1);
}

/** Return a method's values without the query token's own value, the identity. */
function shadesOf({ values, own }) {
  return own === null ? values : values.map((value, index) => (index === own ? null : value));
}

/** Return the end of the color scale; all roles of a method share one. */
function endOf(view) {
  if (view.silent) return Math.abs(view.values[view.own] ?? 0); // the others stay pale
  if (!view.whole) return largestOf(shadesOf(view));
  return Math.max(...Object.values(view.whole.roles).map(largestOf));
}

/** Name a view. */
function titleOf({ name, whole }) {
  return whole ? `${whole.name}, as ${name}` : name;
}

/** Return a method's question and name, or only its name. */
function calledBy({ name, question }) {
  return question ? [question, make('small', {}, name)] : [name];
}

/** Color tokens by the method, and describe the current token. */
function showTokens(about = null) {
  const { tokens: names } = example();
  const current = chosen.pointed === null ? chosen.kept : chosen.pointed;
  const map = current === null ? null : usableMap();
  const row = map ? map.row(current) : null;
  const column = map ? map.column(current) : null;
  tokens.paint(shadesOf(view()), endOf(view()), row, current, chosen.kept);
  const said = sentence(current, map, row, column);
  byId('status').replaceChildren(...said);
  if (chosen.pointed === null) hideTip();
  else if (about) showTip(about.box, about.content);
  else showTip(tokens.elements[current].getBoundingClientRect(), said.map((node) => node.cloneNode(true)));
  showLines(current, map);
  showPartnersOf(current ?? example().asking ?? names.length - 1);
}

/** Show the largest sources and receivers of a token. */
function showPartnersOf(index) {
  const map = usableMap();
  byId('partners').hidden = !map;
  if (!map) return;
  const { tokens: names } = example();
  byId('partners-title').textContent = `Token ${index} “${names[index]}”, layer ${map.facts.index}`;
  showPartners(byId('sources'), names, map.row(index));
  showPartners(byId('takers'), names, map.column(index));
}

/** Explain the colors. */
function showLegend() {
  const largest = overImages.endOf(view().pixels) ?? endOf(view());
  byId('most').textContent = short(largest);
  byId('least').textContent = short(-largest);
  const map = usableMap();
  const bars = map ? ` Bar below a token: how much the token you point at receives from it in layer ${map.facts.index}.` : '';
  const roots = example().tokens.length > LONG ? ' The strips and the picture of layers show square roots.' : '';
  byId('shown').textContent = `Background: relevance by ${titleOf(view())}.${ownEntry(view())}${bars}${roots}`;
}

/** Paint a view's relevance over an image whose tokens are patches. */
function paintImage(canvas, view) {
  const { grid: [rows, columns], cells } = example().image;
  const values = shadesOf(view);
  const patches = { rows, columns, values: cells.map((token) => values[token]), largest: endOf(view) };
  overImages.paint(canvas, patches, view.pixels);
}

function showOverImage() {
  if (tokens.canvas) paintImage(tokens.canvas, view());
  overImages.tell(Boolean(view().pixels));
}

/** Name the value that has no color. */
function ownEntry({ values, own, silent }) {
  const nothing = silent ? ' All other values are negligible.' : '';
  if (own === null || values[own] === null) return nothing;
  return ` Not colored: the query token ${own}, ${short(values[own])}, mostly the identity matrix.${nothing}`;
}

/** List a token's relevance by role, largest first. */
function partsOf({ roles = {} }, index) {
  const parts = Object.entries(roles).map(([role, values]) => [role, values[index]]);
  parts.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  return parts.length ? ` (${parts.map(([role, value]) => `${role} ${short(value)}`).join(', ')})` : '';
}

/** Describe the current token. */
function sentence(current, map, row, column) {
  if (current === null) return [];
  const { tokens: names } = example();
  const method = view();
  const said = [];
  const say = (text) => said.push(document.createTextNode(text));
  const quote = (index) => {
    say('“');
    said.push(make('bdi', { className: 'name' }, names[index])); // the quotes keep the sentence's direction
    say('”');
  };
  say(`Token ${current} `);
  quote(current);
  say(`${chosen.kept === current ? ' (selected)' : ''}: ${short(method.values[current])} by ${titleOf(method)}${partsOf(method, current)}.`);
  const tell = (verb, values) => {
    const [best] = strongest(values, 1);
    if (best === undefined) return;
    say(` ${verb} `);
    quote(best);
    say(` (token ${best}, ${short(values[best])}).`);
  };
  if (map) {
    tell(`In layer ${map.facts.index} it receives most from`, row);
    tell('It sends most to', column);
    if (entering) say(` Relevance at the layer's input: ${short(entering.at(map.facts.index, current))}.`);
  }
  return said;
}

/** Show the chosen layer's name and map. */
function showLayer() {
  const map = layers[chosen.layer];
  if (!map) return;
  const { index, module, family } = map.facts;
  byId('layer-name').textContent = `Layer ${index} of 0–${FACTS.layers - 1}: ${family}, ${module}`;
  const names = example().tokens;
  paintMap(byId('overview'), map, map.size === names.length ? names : []);
  [byId('overview-note').textContent, byId('note').textContent] = mapNotes(map, names.length);
  showLegend();
  showTokens();
}

/** Mark the current layer and token in the pictures. */
function showLines(current, map) {
  const size = example().tokens.length;
  placeLine(byId('overview'), 'row', map ? current : null, size);
  placeLine(byId('overview'), 'column', map ? current : null, size);
  if (!entering) return;
  const chart = byId('entering').querySelector('.chart');
  const layer = layers.length ? layers[chosen.layer].facts.index : null;
  placeLine(chart, 'row', layer === null ? null : entering.layers - 1 - layer, entering.layers);
  const inside = current !== null && current >= zoom[0] && current < zoom[1];
  placeLine(chart, 'column', inside ? current - zoom[0] : null, zoom[1] - zoom[0]);
}

/** Redraw the pictures after a zoom. */
function showZoomed() {
  paintMethods();
  showEntering();
  showTokens();
}

/** Show relevance at each layer's input, by the view's method. */
function showEntering() {
  const { tokens: names } = example();
  const told = [view().whole ?? view(), ...views].find((each) => enteringOf(each, names.length));
  entering = told ? enteringOf(told, names.length) : null;
  byId('entering').hidden = !entering;
  byId('layers').hidden = !entering && !layers.length && !example().lens.length;
  if (!entering) return;
  byId('entering').querySelector('h3').textContent = `Relevance at each layer's input, by ${told.name}`;
  paintEntering(byId('entering').querySelector('.chart'), entering, names);
}

/** Paints small maps when they come into view. */
const inView = new IntersectionObserver((changes) => {
  if (!changes.some((change) => change.isIntersecting)) return;
  byId('thumbnails').querySelectorAll('canvas').forEach((canvas, index) => paintSmall(canvas, layers[index]));
  inView.disconnect();
});

function watchThumbnails() {
  inView.disconnect();
  inView.observe(byId('thumbnails'));
}

/** Show a newly chosen map. */
function showMap() {
  const { maps, start } = example();
  const map = maps[chosen.map];
  const unpacked = map ? map.layers.filter(({ block }) => BLOCKS[block]) : [];
  layers = unpacked.map((facts) => new LayerMap(facts));
  if (layers.length) {
    const first = layers.findIndex(({ facts }) => facts.index === start);
    chosen.layer = Math.min(chosen.layer ?? Math.max(0, first), layers.length - 1);
  }
  byId('controls').hidden = byId('map-picture').hidden = byId('beside').hidden = !layers.length;
  byId('layers').hidden = !entering && !layers.length && !example().lens.length;
  makeThumbnails(byId('thumbnails'), layers, chosen.layer);
  watchThumbnails();
  if (layers.length) showLayer();
  else {
    byId('note').textContent = '';
    showLegend();
    showTokens();
  }
}

/** Show all that depends on the explained output or the method. */
function showRelevance() {
  const { predictions, asked } = example();
  const { answer, against } = chosen;
  const rival = against === null ? '' : ` rather than “${predictions[against].label}”`;
  const logit = predictions[answer]?.logit - (predictions[against]?.logit ?? 0);
  const { output = logit } = view().whole ?? view();
  const what = Math.abs(output - logit) <= 1e-3 * Math.max(1, Math.abs(logit)) ? `logit${against === null ? '' : ' difference'}` : 'explained output';
  const astray = (view().whole ?? view()).astray ? ` This method explains only “${predictions[asked].label}”.` : '';
  byId('explained').textContent = explainedBy(example(), answer, against);
  byId('strongest-title').textContent = `Most relevant for “${predictions[answer]?.label ?? 'the output'}”${rival}`;
  showStrongest(byId('strongest'), example(), view(), shadesOf(view()), { what, logit, astray });
  showSentences(byId('sentences'), example(), shadesOf(view()));
  showEntering();
  showOverImage();
  showLegend();
  showTokens();
  showNumbers();
}

/** Show a newly chosen answer. */
function showAnswer() {
  const { predictions, methods, asked } = example();
  const { answer, against } = chosen;
  showChips(example(), answer, against, methods.some((method) => method.answers.length > 0));
  findViews();
  showMethods();
  for (const note of document.querySelectorAll('.note.asked')) {
    note.hidden = answer === asked && against === null;
    note.textContent = `This part explains only “${predictions[asked]?.label}”.`;
  }
  showRelevance();
}

/** Show a row, or a small picture, for each method and role. */
function showMethods() {
  const { tokens: names, image, predictions, asked } = example();
  const field = byId('methods');
  const legend = field.querySelector('legend');
  const gridded = image && image.grid;
  field.classList.toggle('of-images', Boolean(gridded));
  const rows = views.map((view, index) => {
    const checked = index === chosen.method;
    const radio = make('input', { type: 'radio', name: 'method', value: index, checked });
    if (view.whole) radio.setAttribute('aria-label', titleOf(view));
    const canvas = make('canvas');
    canvas.setAttribute('aria-hidden', 'true');
    const shades = shadesOf(view);
    const most = make('span', { className: 'largest' });
    if (view.whole) most.append(make('bdi', {}, names[strongest(shades, 1)[0]]), ' ');
    else most.append(view.silent ? 'negligible: at most ' : 'strongest ');
    most.append(short(strongestOf(shades)));
    const picture = () => make('img', { className: 'under', src: image.source, alt: '' });
    if (gridded) canvas.className = 'over';
    return make(
      'label',
      { className: `${view.whole ? 'role' : ''}${(view.whole ?? view).astray ? ' astray' : ''}` },
      radio,
      make('span', { className: 'name' }, ...calledBy(view)),
      gridded ? make('span', { className: 'thumb' }, picture(), canvas) : canvas,
      most,
      ...sumToldOf(view.whole ? {} : view),
      ...(view.astray ? [make('span', { className: 'sum' }, `This method explains only “${predictions[asked].label}”.`)] : []),
    );
  });
  field.replaceChildren(legend, byId('zoom'), ...rows);
  paintMethods();
}

/** Paint the methods' strips in the theme's colors. */
function paintMethods() {
  const { image, tokens: names } = example();
  const canvases = byId('methods').querySelectorAll('canvas');
  views.forEach((view, index) => {
    if (image && image.grid) paintImage(canvases[index], view);
    else {
      paintStrip(canvases[index], shadesOf(view).slice(...zoom), endOf(view), names.length > LONG);
      markSentences(canvases[index]);
    }
  });
}

function showNumbers() {
  const holder = byId('numbers-table');
  holder.replaceChildren(...(byId('numbers').open ? [numbersTable(example(), views)] : []));
}

/** Show the chosen example. */
function showExample() {
  const { maps, image, asked } = example();
  Object.assign(chosen, { answer: asked, against: null, layer: null, pointed: null, kept: null });
  showImage(byId('seen'), image);
  tokens = new TokenView(byId('text'), byId('picture'), example(), act);
  byId('over-image').hidden = tokens.canvas === null;
  document.documentElement.classList.toggle('on-images', tokens.canvas !== null);
  byId('zoom').hidden = example().tokens.length <= LONG || image !== null;
  zoomTo(0, example().tokens.length);
  byId('map').replaceChildren(...maps.map(({ name }, index) => new Option(name, index)));
  byId('map-choice').hidden = maps.length < 2;
  byId('map').value = chosen.map;
  layers = [];
  showAnswer();
  showMap();
  scissors.show(example());
  showFlow(byId('flow'), example());
  showLens(byId('lens'), example());
  showBest();
}

/** Show the graph, or the reason for no graph. */
function showFlow(section, { graph: { nodes, obstacle } }) {
  section.hidden = !nodes.length && obstacle === null;
  showGraph(section.querySelector('.graph'), example());
}

/** Show the prediction after each block. */
function showLens(section, { lens, predictions, asked }) {
  section.hidden = !lens.length;
  if (!lens.length) return;
  const titles = ['Block', 'Prediction', 'Probability', `“${predictions[asked].label}”`];
  const head = titles.map((title, at) => make('th', { scope: 'col', className: at < 2 ? '' : 'number' }, title));
  section.querySelector('thead').replaceChildren(make('tr', {}, ...head));
  fillRows(
    section.querySelector('tbody'),
    lens.map(({ name, best, chance, explained }) => [name, best, { number: percent(chance) }, { number: percent(explained) }]),
  );
}

/** Keep the example and the cuts in the address. */
function remember(cut) {
  const parts = [chosen.example ? `example=${chosen.example + 1}` : '', cut && `cut=${cut}`].filter(Boolean);
  try {
    history.pushState(null, '', parts.length ? `#${parts.join('&')}` : location.pathname + location.search);
  } catch {
    // a page within another has no address
  }
}

/** Show the example and the cuts that the address names. */
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const number = Number(asked.get('example') ?? 1) - 1;
  const before = chosen.example;
  chosen.example = FACTS.examples[number] ? number : 0;
  byId('example').value = chosen.example;
  if (chosen.example !== before) showExample();
  scissors.read(asked.get('cut'));
}

/** Scroll to the strongest token. */
function showBest() {
  const [best] = strongest(shadesOf(view()), 1);
  if (best !== undefined) tokens.show(best);
}

function begin() {
  const families = FACTS.families.join(', ');
  byId('model').textContent = `${FACTS.model}: ${FACTS.layers} token mixers (${families})`;
  byId('choice').hidden = FACTS.examples.length < 2;
  byId('example').append(...FACTS.examples.map(({ name }, index) => new Option(name, index)));
  const choose = (id, change) => byId(id).addEventListener('change', (event) => change(event.target.value));
  choose('example', (value) => {
    chosen.example = Number(value);
    remember('');
    showExample();
  });
  choose('targets', (value) => {
    chosen.answer = Number(value);
    if (chosen.against === chosen.answer) chosen.against = null;
    showAnswer();
    byId('targets').querySelector(':checked').focus();
  });
  choose('rivals', (value) => {
    chosen.against = value === '' ? null : Number(value);
    showAnswer();
    byId('rivals').querySelector(':checked').focus();
  });
  choose('methods', (value) => {
    chosen.method = Number(value);
    showRelevance();
    showBest();
  });
  choose('map', (value) => {
    chosen.map = Number(value);
    showMap();
  });
  choose('thumbnails', (value) => chooseLayer(Number(value)));
  byId('numbers').addEventListener('toggle', showNumbers);
  for (const id of ['text', 'picture']) TokenView.listen(byId(id), () => tokens);
  for (const id of ['strongest', 'sentences']) {
    byId(id).addEventListener('click', (event) => {
      const button = event.target.closest('.jump');
      if (button) act('jump', Number(button.dataset.index));
    });
  }
  listenToStrips(byId('methods'));
  listenToDrags(showZoomed);
  for (const [id, factor] of [['closer', 0.5], ['wider', 2]]) {
    byId(id).addEventListener('click', () => {
      zoomBy(factor);
      showZoomed();
    });
  }
  listenToChart(byId('overview'), mapCell);
  listenToChart(byId('entering').querySelector('.chart'), enteringCell);
  addEventListener('scroll', hideTip, { passive: true });
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    hideTip();
    if (chosen.kept !== null) act('keep', chosen.kept);
  });
  scissors = new Scissors(byId('cuts'), remember);
  addEventListener('popstate', readAddress);
  themeButton(byId('theme'), () => {
    if (!tokens) return; // nothing is shown yet
    showMethods();
    showRelevance();
    if (layers.length) showLayer();
    watchThumbnails();
  });
  showExample();
  readAddress();
}

unpack(begin, showMap);
