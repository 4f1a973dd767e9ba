// Sets the chosen theme before the first paint; a classic script, since modules run after it. Knows nothing of pages.
{
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("mint-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch {
    // storage may be forbidden; the system's theme is used then
  }
}
