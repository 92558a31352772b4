'use strict';

/* The page: what is chosen, and what is shown of it. */

const FACTS = JSON.parse(byId('facts').textContent);

/** What is chosen: an example, a method, a map and its layer; the token pointed at, and kept. */
const chosen = { example: 0, method: 0, map: 0, layer: 0, pointed: null, kept: null };
let tokens = null;
let layers = [];
let overImages = null;

const example = () => FACTS.examples[chosen.example];

/** The layer's map, if its rows belong to the tokens that are shown. */
function usableMap() {
  const map = layers[chosen.layer];
  return map && map.size === example().tokens.length ? map : null;
}

function act(kind, index) {
  if (kind === 'layer') {
    if (!layers.length) return;
    chosen.layer = Math.max(0, Math.min(layers.length - 1, chosen.layer + index));
    byId('layer').value = chosen.layer;
    showLayer();
    return;
  }
  if (kind === 'point') {
    if (chosen.pointed === index) return;
    chosen.pointed = index;
    if (chosen.kept !== null) return;
  } else chosen.kept = index === chosen.kept ? null : index;
  showTokens();
}

/** What tokens may be coloured by: each method, and below it each role that its rule tells. */
function views() {
  return example().methods.flatMap((method) => [
    method,
    ...Object.entries(method.roles).map(([role, values]) => ({ name: role, values, own: null, whole: method })),
  ]);
}

/** A method's values without the one that the asking token has of itself, the identity. */
function shadesOf({ values, own }) {
  return own === null ? values : values.map((value, index) => (index === own ? null : value));
}

/** The end of a view's scale: roles of a method have one, so that they compare. */
function endOf(view) {
  if (!view.whole) return largestOf(shadesOf(view));
  return Math.max(...Object.values(view.whole.roles).map(largestOf));
}

/** A view in words. */
function titleOf({ name, whole }) {
  return whole ? `${whole.name}, as ${name}` : name;
}

/** Tokens coloured by the method, or by the row of the token that is looked at. */
function showTokens() {
  const { tokens: names } = example();
  const method = views()[chosen.method];
  const current = chosen.kept === null ? chosen.pointed : chosen.kept;
  const map = current === null ? null : usableMap();
  const row = map ? map.row(current) : null;
  const column = map ? map.column(current) : null;
  const largest = row ? largestOf(row) : endOf(method);
  tokens.paint(row || shadesOf(method), largest, column, current, chosen.kept);
  const end = showOverImage(row, method, largest);
  const layer = map ? `layer ${map.facts.index}` : '';
  byId('most').textContent = short(end);
  byId('least').textContent = short(-end);
  byId('shown').textContent = map
    ? `Background: what token ${current} takes from each token in ${layer}; bar below: what it gives to each.`
    : `Background: relevance by ${titleOf(method)}.${ownEntry(method)}`;
  byId('status').replaceChildren(...sentence(current, map, row, column));
  showOverviewLines(current, map);
  byId('partners').hidden = !map;
  byId('hint').hidden = !usableMap() || Boolean(map);
  if (!map) return;
  byId('partners-title').textContent = `Token ${current} “${names[current]}”, ${layer}`;
  showPartners(byId('sources'), names, row);
  showPartners(byId('takers'), names, column);
}

/** What lies over the image, in the manner that is chosen: pixels where a view has some. */
function cellsOver(values, largest, { pixels }) {
  if (overImages.manner === 'pixels' && pixels) return cellsOf(pixels);
  const { grid: [rows, columns], cells } = example().image;
  return { rows, columns, values: cells.map((token) => values[token]), largest };
}

/** Paint the image, if its tokens are patches; where the scale of what is painted ends. */
function showOverImage(row, view, largest) {
  if (!tokens.canvas) return largest;
  const whole = row ? {} : view; // a row of the map is of patches
  paintOver(tokens.canvas, cellsOver(row || shadesOf(view), largest, whole), overImages.manner);
  overImages.tell(Boolean(view.pixels));
  return overImages.manner === 'pixels' && whole.pixels ? whole.pixels.largest : largest;
}

/** What is left out of the colours, in words. */
function ownEntry({ values, own }) {
  if (own === null || values[own] === null) return '';
  return ` Without that of token ${own}, which asks: ${short(values[own])}, mostly the identity.`;
}

/** What a token's relevance is made of, the largest part first. */
function partsOf({ roles = {} }, index) {
  const parts = Object.entries(roles).map(([role, values]) => [role, values[index]]);
  parts.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  return parts.length ? ` (${parts.map(([role, value]) => `${role} ${short(value)}`).join(', ')})` : '';
}

/** The token that is looked at, in words. */
function sentence(current, map, row, column) {
  if (current === null) {
    return [document.createTextNode('Point at a token, or move to one with Tab and the arrow keys.')];
  }
  const { tokens: names } = example();
  const method = views()[chosen.method];
  const said = [];
  const say = (text) => said.push(document.createTextNode(text));
  const quote = (index) => {
    say('“');
    said.push(make('bdi', { className: 'name' }, names[index])); // the quotes keep the sentence's direction
    say('”');
  };
  say(`Token ${current} `);
  quote(current);
  say(`${chosen.kept === null ? '' : ' (kept)'}: ${short(method.values[current])} by ${titleOf(method)}${partsOf(method, current)}.`);
  const tell = (verb, values) => {
    const [best] = strongest(values, 1);
    if (best === undefined) return;
    say(` ${verb} `);
    quote(best);
    say(` (token ${best}, ${short(values[best])}).`);
  };
  if (map) {
    tell(`In layer ${map.facts.index} it takes most from`, row);
    tell('It gives most to', column);
  }
  return said;
}

/** The chosen layer: its name, its picture, and what is kept of it. */
function showLayer() {
  const map = layers[chosen.layer];
  if (!map) return;
  const { index, module, family, side, cell, largest, size, kept } = map.facts;
  byId('layer-name').textContent = `${index} of 0–${FACTS.layers - 1}: ${family}, ${module}`;
  byId('layer').setAttribute('aria-valuetext', `layer ${index}, ${family}`);
  const canvas = byId('overview').querySelector('canvas');
  // by square roots: most entries are far smaller than the largest
  const cells = map.overview();
  const shades = cells.map((value) => Math.sign(value) * Math.sqrt(Math.abs(value)));
  paintCells(canvas, shades, side, side, 1, 1);
  canvas.setAttribute('aria-label', `The map of layer ${index}: ${size} by ${size} tokens`);
  const pooled = cell === 1 ? '' : ` Each cell shows the strongest of ${cell} × ${cell} entries.`;
  const fits = size === example().tokens.length ? '' : ` It has ${size} tokens of its own, at its own resolution.`;
  byId('overview-note').textContent = `Layer ${index}: row = taking token, column = source; strongest ${short(Math.sign(strongestOf(cells)) * largest)}; shades by square roots.${pooled}${fits}`;
  byId('note').textContent = map.whole
    ? 'Values of token-to-token maps are rounded to 1/127 of the largest of their row.'
    : `Of each row of a token-to-token map, the ${kept} strongest of ${size} entries are in this file, rounded to 1/127 of the largest; bars show only entries that are among these. They make up ${shares(map)} of the rows' absolute sums.`;
  showTokens();
}

/** The least and the mean share of rows that is kept, in words. */
function shares(map) {
  const all = Array.from({ length: map.size }, (_, i) => map.share(i));
  const mean = all.reduce((sum, x) => sum + x, 0) / all.length;
  return `${percent(mean)} on average, ${percent(Math.min(...all))} at least,`;
}

function showOverviewLines(current, map) {
  for (const [id, side] of [['row-line', 'top'], ['column-line', 'left']]) {
    const line = byId(id);
    line.style.display = map ? 'block' : 'none';
    if (map) line.style[side] = `${(100 * (current + 0.5)) / map.size}%`;
  }
}

/** The map's layers, the first time and when the map changes. */
function showMap() {
  const map = example().maps[chosen.map];
  layers = map ? map.layers.map((facts) => new LayerMap(facts)) : [];
  chosen.layer = Math.min(chosen.layer, Math.max(0, layers.length - 1));
  byId('controls').hidden = byId('side').hidden = !layers.length;
  byId('reading').classList.toggle('folded', layers.length > 0 && tokens.parts.length > 0);
  byId('reading').classList.toggle('pictured', layers.length > 0 && !byId('picture').hidden);
  byId('layer').max = Math.max(0, layers.length - 1);
  byId('layer').value = chosen.layer;
  if (layers.length) showLayer();
  else {
    byId('note').textContent = '';
    showTokens();
  }
}

/** A row, or a small picture, for each method and role to choose it by. */
function showMethods() {
  const { tokens: names, image } = example();
  const field = byId('methods');
  const legend = field.querySelector('legend');
  const gridded = image && image.grid;
  field.classList.toggle('of-images', Boolean(gridded));
  const rows = views().map((view, index) => {
    const checked = index === chosen.method;
    const radio = make('input', { type: 'radio', name: 'method', value: index, checked });
    if (view.whole) radio.setAttribute('aria-label', titleOf(view));
    const canvas = make('canvas');
    canvas.setAttribute('aria-hidden', 'true');
    const shades = shadesOf(view);
    const most = make('span', { className: 'largest' });
    if (view.whole) most.append(make('bdi', {}, names[strongest(shades, 1)[0]]), ' ');
    else most.append('strongest ');
    most.append(short(strongestOf(shades)));
    const picture = () => make('img', { className: 'under', src: image.source, alt: '' });
    if (gridded) canvas.className = 'over';
    return make(
      'label',
      { className: view.whole ? 'role' : '' },
      radio,
      make('span', { className: 'name' }, view.name),
      gridded ? make('span', { className: 'thumb' }, picture(), canvas) : canvas,
      most,
    );
  });
  field.replaceChildren(legend, ...rows);
  paintMethods();
}

/** The methods' strips, in the colours of the theme. */
function paintMethods() {
  const { image } = example();
  const canvases = byId('methods').querySelectorAll('canvas');
  views().forEach((view, index) => {
    const values = shadesOf(view);
    if (image && image.grid) {
      paintOver(canvases[index], cellsOver(values, endOf(view), view), overImages.manner);
    } else paintStrip(canvases[index], values, endOf(view));
  });
}

function showNumbers() {
  const holder = byId('numbers-table');
  holder.replaceChildren(...(byId('numbers').open ? [numbersTable(example(), views())] : []));
}

/** All of the chosen example. */
function showExample() {
  const { explained, predictions, maps, image } = example();
  // examples may tell other roles
  Object.assign(chosen, { method: Math.min(chosen.method, views().length - 1), pointed: null, kept: null });
  byId('explained').textContent = explained;
  showPredictions(byId('predictions'), predictions);
  showImage(byId('seen'), image);
  showMethods();
  tokens = new TokenView(byId('text'), byId('picture'), example(), act);
  tokens.unfold(strongest(shadesOf(views()[chosen.method]), 5));
  byId('folding').hidden = tokens.parts.length === 0;
  byId('over-image').hidden = tokens.canvas === null;
  document.documentElement.classList.toggle('on-images', tokens.canvas !== null);
  byId('map').replaceChildren(...maps.map(({ name }, index) => new Option(name, index)));
  byId('map-choice').hidden = maps.length < 2;
  byId('map').value = chosen.map;
  showEdges(byId('edges'), example());
  showGraph(byId('graph'), example());
  showNumbers();
  showMap();
}

function begin() {
  const families = FACTS.families.join(', ');
  byId('model').textContent = `${FACTS.model}: ${FACTS.layers} token mixers (${families})`;
  byId('choice').hidden = FACTS.examples.length < 2;
  byId('example').append(...FACTS.examples.map(({ name }, index) => new Option(name, index)));
  byId('example').addEventListener('change', (event) => {
    chosen.example = Number(event.target.value);
    showExample();
  });
  byId('methods').addEventListener('change', (event) => {
    chosen.method = Number(event.target.value);
    tokens.unfold(strongest(shadesOf(views()[chosen.method]), 5));
    showTokens();
  });
  byId('map').addEventListener('change', (event) => {
    chosen.map = Number(event.target.value);
    showMap();
  });
  byId('layer').addEventListener('input', (event) => {
    chosen.layer = Number(event.target.value);
    showLayer();
  });
  byId('unfold').addEventListener('click', () => tokens.foldAll(true));
  byId('fold').addEventListener('click', () => tokens.foldAll(false));
  byId('numbers').addEventListener('toggle', showNumbers);
  overImages = new OverImages(byId('over-image'), () => {
    paintMethods();
    showTokens();
  });
  for (const id of ['text', 'picture']) TokenView.listen(byId(id), () => tokens);
  listenToOverview(byId('overview'));
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && chosen.kept !== null) act('keep', null);
  });
  showExample();
  themeButton(byId('theme'), () => {
    paintMethods();
    if (layers.length) showLayer();
    else showTokens();
  });
}

/** Pointing at a row of the map's picture is pointing at its token. */
function listenToOverview(overview) {
  const tokenAt = (event) => {
    const map = usableMap();
    const box = overview.getBoundingClientRect();
    const share = (event.clientY - box.top) / box.height;
    return map ? Math.max(0, Math.min(map.size - 1, Math.floor(share * map.size))) : null;
  };
  overview.addEventListener('pointermove', (event) => act('point', tokenAt(event)));
  overview.addEventListener('pointerleave', () => act('point', null));
  overview.addEventListener('click', (event) => {
    const index = tokenAt(event);
    if (index === null) return;
    tokens.unfold([index]);
    act('keep', index);
  });
}

begin();
