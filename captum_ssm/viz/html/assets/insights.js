'use strict';

/* The page: it asks the server, and shows what comes back. */

const token = new URLSearchParams(location.search).get('token') ?? '';

async function ask(question, request) {
  const sent = request && {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(request),
  };
  const address = `api/${question}?token=${encodeURIComponent(token)}`;
  const response = await fetch(address, sent).catch(() => {
    throw new Error('The server does not answer. Has its script ended?');
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function say(text, isError = false) {
  byId('status').textContent = text;
  byId('status').classList.toggle('error', isError);
}

let busy = false;

/** Do one thing at a time, and say what went wrong with it. */
async function alone(action) {
  if (busy) return undefined;
  busy = true;
  byId('examples').setAttribute('aria-busy', 'true');
  try {
    return await action();
  } catch (error) {
    say(error.message, true);
    return undefined;
  } finally {
    busy = false;
    byId('examples').removeAttribute('aria-busy');
  }
}

function summary({ examples, searched, ended }) {
  if (searched === 0) return 'The dataset is empty.';
  const one = (count, what) => `${count} ${what}${count === 1 ? '' : 's'}`;
  const end = ended ? ' The end of the dataset is reached; behind it comes its start.' : '';
  const few = examples.length ? '' : ' None passes the filter.';
  return `${one(examples.length, 'example')} of ${searched} searched.${few}${end}`;
}

/** The filter is the one that the examples were found by, whatever was chosen since. */
function showExamples(answer, models, filter) {
  const explain = (id, model, target) =>
    alone(async () => {
      say('Explaining …');
      const output = await ask('relevance', { filter, id, model, target });
      say('Explained.');
      return output;
    });
  const cut = (request) =>
    alone(async () => {
      say('Cutting …');
      const output = await ask('cut', request);
      say(output.error === undefined ? 'Cut.' : 'It cannot be cut.');
      return output;
    });
  const follow = (request) =>
    alone(async () => {
      say('Following …');
      const found = await ask('flow', request);
      say(found.error === undefined ? 'Followed.' : 'It cannot be followed.');
      return found;
    });
  const drawn = answer.examples.map((each) => drawExample(each, models, explain, cut, follow));
  byId('examples').replaceChildren(...drawn);
  byId('overlay-label').hidden = byId('examples').querySelector('.stack') === null;
  say(summary(answer));
}

function fetchExamples(controls, again) {
  return alone(async () => {
    say('Searching …');
    const filter = controls.read();
    const { models, layers } = controls.config;
    const known = models.map((name, index) => ({ name, layers: layers[index] }));
    showExamples(await ask('examples', { filter, again }), known, filter);
  });
}

themeButton(byId('theme'));
byId('overlay').addEventListener('input', (event) => {
  byId('examples').style.setProperty('--overlay', event.target.value / 100);
});

alone(() => ask('config')).then((config) => {
  if (config === undefined) return;
  const controls = new Controls(config);
  byId('choices').addEventListener('submit', (event) => {
    event.preventDefault();
    fetchExamples(controls, true);
  });
  byId('next').addEventListener('click', () => {
    if (byId('choices').reportValidity()) fetchExamples(controls, false);
  });
  fetchExamples(controls, true);
});
