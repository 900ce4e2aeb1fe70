"""The specifications of hooks by topic: one function for each row of `gangline.plugin.hooks.HOOKS`.

Each docstring has a complete plugin: a module, registered in its pyproject.toml as

    [project.entry-points."gangline.v1"]
    watched = "gangline_watched"

Every command imports the module, so it imports neither torch nor its own working modules at its top: `build` names
code that a run imports when it has chosen the part. (The examples are one file, with torch inside functions.)
"""
