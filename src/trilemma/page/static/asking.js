// Questions to the server the page came from, and to no other.

/** What went wrong, in the server's words. */
export class Refused extends Error {}

/** Ask for JSON; parameters that are empty are left out, lists are repeated. */
export async function ask(address, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== "" && one !== null && one !== undefined) query.append(name, one);
    }
  }
  const text = query.toString();
  const answer = await fetch(text ? `${address}?${text}` : address);
  if (answer.ok) return answer.json();
  throw new Refused(await reason(answer));
}

async function reason(answer) {
  const told = await answer.text();
  try {
    const { detail } = JSON.parse(told);
    if (typeof detail === "string") return detail;
    return detail.map((one) => `${one.loc[one.loc.length - 1]}: ${one.msg}`).join("; ");
  } catch {
    return told || `the server answered ${answer.status}`;
  }
}

/** Call `changed` whenever a watched folder changes, and `state` when the line to the server is up or down. */
export function watch(changed, state) {
  const source = new EventSource("/api/events");
  let version = null;
  source.addEventListener("open", () => state(true));
  source.addEventListener("error", () => state(false));
  source.addEventListener("message", (event) => {
    if (version !== null && version !== event.data) changed();
    version = event.data;
  });
}
