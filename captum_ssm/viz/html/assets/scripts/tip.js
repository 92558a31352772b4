'use strict';

/* A tooltip beside the pointer. The status line has the same text for screen readers. */

/** Pixels from the tooltip to its element and to the window's edge. */
const APART = 8;

/** Show a tooltip below a box of the window, or above if there is no room. */
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

/** Return the box of a pointer, for a tooltip. */
const boxOf = ({ clientX, clientY }) => new DOMRect(clientX, clientY, 0, 0);
