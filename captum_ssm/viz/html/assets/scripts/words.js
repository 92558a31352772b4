'use strict';

/* Show the relevance of words by pointing, tapping and keys. */

/** Mark a word of a text and show its relevance; null clears the mark. */
function showWord(flow, word) {
  flow.querySelector('.token.current')?.classList.remove('current');
  if (!word) {
    hideTip();
    return;
  }
  word.classList.add('current');
  tell(word);
}

/** Show a word's relevance beside it. */
function tell(word) {
  const worth = make('strong', {}, word.dataset.percent);
  showTip(word.getBoundingClientRect(), [
    '“', make('bdi', {}, word.textContent), '”: ', worth, ' % of the strongest word',
  ]);
}

/** Handle a key in a text; return true if the key has an effect. */
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

/** Show the relevance of words of all texts in a container. */
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
