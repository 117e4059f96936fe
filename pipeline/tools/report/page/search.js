// What the search box looks at: the ids, the prompt, the responses and the reasons of a group.
const words = new WeakMap();

const whole = (excerpt) => (excerpt ? excerpt.start + excerpt.end : "");

function wordsOf(group) {
  if (!words.has(group)) {
    const lines = [group.id, group.label, whole(group.asked), whole(group.prompt)];
    for (const rollout of group.members) {
      lines.push(rollout.id, ...rollout.reasons, ...rollout.reasons.map((reason) => reason.replaceAll("_", " ")));
      for (const row of rollout.rows) lines.push(whole(row.response), row.by_token?.texts?.join(""), ...Object.values(row.beside ?? {}));
    }
    words.set(group, lines.filter((line) => line !== null && line !== undefined).join("\n").toLowerCase());
  }
  return words.get(group);
}

export function matches(group, search) {
  const wanted = search.trim().toLowerCase();
  return !wanted || wordsOf(group).includes(wanted);
}
