"""HTTP: routes, authentication, bodies and the access log. The only room that knows Starlette."""
