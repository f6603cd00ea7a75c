"""Save, load and open by name: the protocol of formats, and no format."""
