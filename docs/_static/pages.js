'use strict';

/* What is wider than its column is scrolled by keyboard as well: it takes the focus. */

function nameOf(element) {
  const section = element.closest('section');
  const heading = section && section.querySelector('h1, h2, h3, h4');
  const kind = element.matches('pre') ? 'Code' : 'Table';
  return heading ? `${kind} of ${heading.firstChild.textContent.trim()}` : kind;
}

function letFocus() {
  const seen = new Map();
  for (const element of document.querySelectorAll('.content pre, .content .table-wrapper')) {
    if (element.scrollWidth > element.clientWidth) {
      element.tabIndex = 0;
      element.setAttribute('role', 'region');
      const name = nameOf(element);
      const number = (seen.get(name) ?? 0) + 1;
      seen.set(name, number);
      element.setAttribute('aria-label', number > 1 ? `${name}, ${number}` : name);
    } else {
      for (const name of ['tabindex', 'role', 'aria-label']) element.removeAttribute(name);
    }
  }
}

addEventListener('load', letFocus);
addEventListener('resize', letFocus);
