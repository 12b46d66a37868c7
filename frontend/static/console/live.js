// The live page: htmx swaps what the server pushes; this file says honestly how old it is.
// Only monotonic time is used: the clock of the viewer's machine may be wrong.
(() => {
  "use strict";
  const LOST_MS = 4000; // the server pushes at least every 1.5 s
  const RETRY_MS = 6000;
  const live = document.getElementById("live");
  const lost = document.getElementById("push-lost");
  const title = document.title;
  let connection = null;
  let pushedAt = performance.now();
  let kickedAt = pushedAt;

  const age = (ms) => {
    if (ms < 59950) return `${(ms / 1000).toFixed(1)} s`;
    const seconds = Math.round(ms / 1000);
    if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(seconds % 60).padStart(2, "0")} s`;
    return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds % 3600) / 60)).padStart(2, "0")} min`;
  };

  const setLost = (isLost) => {
    if (lost.hidden !== isLost) return;
    lost.hidden = !isLost;
    live.classList.toggle("lost", isLost);
    if (isLost) {
      const taken = live.querySelector("#freshness time");
      lost.textContent = taken
        ? `The connection to the console is down since shortly after ${taken.textContent} UTC. The figures below are not current; reconnecting.`
        : "The connection to the console is down; reconnecting.";
      const word = live.querySelector("#freshness .word");
      if (word) word.textContent = "Stale";
    } else {
      lost.textContent = "";
    }
  };

  const tick = () => {
    const silence = performance.now() - pushedAt;
    if (!document.hidden) setLost(silence > LOST_MS);
    const freshness = live.querySelector("#freshness");
    if (!freshness) return;
    const figure = freshness.querySelector(".age");
    const stale = live.classList.contains("lost") || freshness.dataset.stale === "1";
    if (figure) figure.textContent = age(Number(freshness.dataset.ageMs) + silence);
    document.title = stale ? `(stale) ${title}` : title;
    if (!document.hidden && silence > RETRY_MS && performance.now() - kickedAt > RETRY_MS) reconnect();
  };

  // A connection can be dead without an error (a laptop that slept, a router that forgot it): end it, and htmx opens another.
  const reconnect = () => {
    kickedAt = performance.now();
    if (!connection) htmx.trigger(live, "console:connect");
    else if (connection.reader) connection.reader.cancel();
    else if (connection.abortController) connection.abortController.abort();
  };

  // Signed out elsewhere, or the session ended: the page itself knows where to go.
  const leave = (status) => {
    if (status === 401 || status === 403) location.reload();
  };

  live.addEventListener("htmx:after:sse:connection", (event) => {
    connection = event.detail.connection;
  });
  live.addEventListener("htmx:after:sse:message", () => {
    pushedAt = performance.now();
    tick();
  });
  live.addEventListener("htmx:sse:close", () => {
    connection = null;
  });
  live.addEventListener("htmx:sse:error", (event) => leave(event.detail.status));
  live.addEventListener("htmx:response:error", (event) => leave(event.detail.ctx.response.status));
  live.addEventListener("console:signed-out", () => location.reload());
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) kickedAt = performance.now();
    tick();
  });
  setInterval(tick, 250);
})();
