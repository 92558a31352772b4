'use strict';

/* What is pointed at, in words beside it. The status line says the same to those who listen. */

/** Pixels between the words and what they are about, and the window's edge. */
const APART = 8;

/** Say something beside a box of the window: below it, or above where there is no room. */
function showTip(box, content) {
  const tip = byId('tip');
  tip.replaceChildren(...content);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const { clientWidth, clientHeight } = document.documentElement;
  const middle = box.left + box.width / 2 - width / 2;
  const below = box.bottom + APART;
  const fits = below + height + APART <= clientHeight;
  tip.style.left = `${Math.max(APART, Math.min(middle, clientWidth - width - APART))}px`;
  tip.style.top = `${fits ? below : Math.max(APART, box.top - height - APART)}px`;
}

function hideTip() {
  byId('tip').hidden = true;
}

/** The box of a pointer, for what is said beside it. */
const boxOf = ({ clientX, clientY }) => new DOMRect(clientX, clientY, 0, 0);
