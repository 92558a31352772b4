// Ranks results by the heading that shares most words with the question; the reference comes last.
const searchWords = (text) =>
  (text.toLowerCase().match(/[a-z0-9]{2,}/g) ?? []).map((word) => word.replace(/s$/, ""));

var Scorer = {
  score: ([docname, , , , score, , kind]) => {
    const asked = searchWords(new URLSearchParams(location.search).get("q") ?? "");
    const file = Search._index.docnames.indexOf(docname);
    let best = 0;
    for (const [title, places] of Object.entries(Search._index.alltitles)) {
      if (!places.some(([at]) => at === file)) continue;
      const words = searchWords(title);
      const shared = asked.filter((word) => words.includes(word)).length;
      best = Math.max(best, (2 * shared) / (asked.length + words.length));
    }
    const own = searchWords(Search._index.titles[file] ?? "");
    if (asked.every((word) => own.includes(word))) best += 0.2; // of equal headings the page's own
    const reference = docname.startsWith("docs/api/") && kind !== "object";
    return score + 40 * best - (reference ? 10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
