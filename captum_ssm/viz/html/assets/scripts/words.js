'use strict';

/* Words and what they are worth: by pointing at them, by tapping, and by keys. */

/** Mark a word of a text, and say what it is worth; null lets go. */
function showWord(flow, word) {
  flow.querySelector('.token.current')?.classList.remove('current');
  if (!word) {
    hideTip();
    return;
  }
  word.classList.add('current');
  tell(word);
}

/** Say beside a word what it is worth. */
function tell(word) {
  const worth = make('strong', {}, word.dataset.percent);
  showTip(word.getBoundingClientRect(), [
    '“', make('bdi', {}, word.textContent), '”: ', worth, ' in hundredths of the strongest',
  ]);
}

/** What a key does on the words of a text; whether it did anything. */
function pressOnWords(flow, key) {
  const words = [...flow.querySelectorAll('.token')];
  const at = words.findIndex((word) => word.classList.contains('current'));
  const step = getComputedStyle(flow).direction === 'rtl' ? -1 : 1;
  const last = words.length - 1;
  const places = {
    ArrowRight: at + step, ArrowLeft: at < 0 ? last : at - step, Home: 0, End: last, Escape: -2,
  };
  if (!(key in places) || last < 0) return false;
  const place = places[key];
  const word = place === -2 ? null : words[Math.max(0, Math.min(last, place))];
  word?.scrollIntoView({ block: 'nearest' });
  showWord(flow, word);
  return true;
}

/** Let the words of all texts in a container say what they are worth. */
function listenToWords(container) {
  const wordOf = (event) => event.target.closest('.flow .token');
  const point = (event) => {
    const word = wordOf(event);
    if (word) showWord(word.closest('.flow'), word);
  };
  container.addEventListener('pointerover', point);
  container.addEventListener('click', point);
  container.addEventListener('pointerout', (event) => {
    const word = wordOf(event);
    if (word && event.pointerType !== 'touch') showWord(word.closest('.flow'), null);
  });
  container.addEventListener('focusout', (event) => {
    const flow = event.target.closest('.flow');
    if (flow) showWord(flow, null);
  });
  const follow = () => {
    const word = container.querySelector('.token.current');
    if (word) tell(word);
  };
  addEventListener('scroll', follow, { passive: true, capture: true }); // texts scroll, too
  container.addEventListener('keydown', (event) => {
    const flow = event.target.closest('.flow');
    if (flow && pressOnWords(flow, event.key)) event.preventDefault();
  });
}
