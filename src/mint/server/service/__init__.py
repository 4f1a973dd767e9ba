"""The operations of the service: check the caller, accept the request durably, look results up."""
