'use strict';

/* The Insights page: it asks the server, or its own data, and shows the answers. */

const token = new URLSearchParams(location.search).get('token') ?? '';

// a snapshot has facts instead of a server

/** The key of a stored explanation of a class. */
const placeOf = ({ id, model, method, target }) => [id, model, method, target].join();

async function ask(question, request) {
  if (FACTS) return question === 'relevance' ? FACTS.relevance[placeOf(request)] : FACTS[question];
  const sent = request && {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(request),
  };
  const address = `api/${question}?token=${encodeURIComponent(token)}`;
  const response = await fetch(address, sent).catch(() => {
    throw new Error('The server does not answer. Check that its script still runs.');
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(text, isError = false) {
  byId('status').textContent = text;
  byId('status').classList.toggle('error', isError);
}

let turn = Promise.resolve();
let waiting = 0;

/** Run actions one after the other, and show their errors. */
function alone(action) {
  waiting += 1;
  byId('examples').setAttribute('aria-busy', 'true');
  turn = turn
    .then(action)
    .catch((error) => say(error.message, true))
    .finally(() => {
      waiting -= 1;
      if (waiting === 0) byId('examples').removeAttribute('aria-busy');
    });
  return turn;
}

function summary({ examples, searched, ended, labelled }) {
  if (searched === 0) return 'The dataset is empty.';
  const one = (count, what) => `${count} ${what}${count === 1 ? '' : 's'}`;
  const end = ended && !FACTS ? ' This is the end of the dataset; “Next examples” starts again at the first.' : '';
  const few = examples.length ? '' : ' None passes the filter.';
  const none = labelled ? '' : ' Without labels, predictions are neither correct nor incorrect.';
  return `${one(examples.length, 'example')} of ${searched} searched.${few}${none}${end}`;
}

/** Paint the relevance of images in the chosen form. */
function layOverImages() {
  const canvases = [...byId('examples').querySelectorAll('.stack > canvas')];
  canvases.forEach((canvas) => canvas.lay());
  byId('over-image').hidden = byId('examples').querySelector('.stack') === null;
  document.documentElement.classList.toggle('on-images', !byId('over-image').hidden);
  overImages.tell(canvases.every((canvas) => canvas.told));
}

/** Ask a question, and show its progress and result in the status. */
function told(question, request, doing, done, failed) {
  return alone(async () => {
    say(doing);
    const found = await ask(question, request);
    say(found.error === undefined ? done : failed);
    return found;
  });
}

/** Show examples; `filter` is the one that found them, even if the choices changed since. */
function showExamples(answer, models, filter) {
  const methods = 1 + filter.beside.length;
  const page = {
    explain: (request) =>
      alone(async () => {
        say('Explaining …');
        const outputs = [];
        for (let method = 0; method < methods; method++) {
          outputs.push(await ask('relevance', { filter, ...request, method }));
        }
        say('Explained.');
        return outputs;
      }),
    messages: (request) => told('messages', request, 'Ranking messages …', 'Ranked.', 'Messages cannot be ranked.'),
    cut: (request) => told('cut', request, 'Cutting …', 'Cut.', 'The message cannot be cut.'),
    follow: (request) => told('flow', request, 'Making the graph …', 'The graph is shown.', 'There is no graph.'),
    known: (request) => !FACTS || placeOf({ ...request, method: 0 }) in FACTS.relevance,
    drawn: layOverImages,
  };
  byId('examples').replaceChildren(...answer.examples.map((each) => drawExample(each, models, page)));
  layOverImages();
  say(summary(answer));
}

function fetchExamples(config, filter, again) {
  return alone(async () => {
    say('Searching …');
    const models = config.models.map((name, index) => ({ name, layers: config.layers[index] }));
    showExamples(await ask('examples', { filter, again }), models, filter);
  });
}

const overImages = new OverImages(byId('over-image'), layOverImages);

function begin() {
  themeButton(byId('theme'));
  listenToWords(byId('examples'));
  byId('choosing').hidden = byId('next').hidden = Boolean(FACTS);
  byId('kept').hidden = !FACTS;
  alone(() => ask('config')).then((config) => {
    if (config === undefined) return;
    if (FACTS) {
      fetchExamples(config, config.filter, true);
      return;
    }
    const controls = new Controls(config);
    byId('choices').addEventListener('submit', (event) => {
      event.preventDefault();
      fetchExamples(config, controls.read(), true);
    });
    byId('next').addEventListener('click', () => {
      byId('choosing').open ||= !byId('choices').checkValidity();
      if (byId('choices').reportValidity()) fetchExamples(config, controls.read(), false);
    });
    fetchExamples(config, controls.read(), true);
  });
}

unpack(begin);
