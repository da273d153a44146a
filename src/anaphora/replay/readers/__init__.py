"""One module per trace format; each turns lines into `TraceRequest`s, as a stream."""
