// Runs before the first paint, as a classic script, because modules run later. Sets the chosen theme, and asks for the data
// that the page's script will want while that script is still being loaded (`ask` of common.js takes it).
{
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("mint-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch {
    // Storage may be forbidden; then the system's theme is used.
  }
  const urls = JSON.parse(document.currentScript?.dataset.wanted ?? "[]");
  window.asked = new Map(urls.map((url) => [url, fetch(url, { headers: { accept: "application/json" } })]));
  for (const answer of window.asked.values()) answer.catch(() => undefined); // whoever takes it says what is wrong
}
