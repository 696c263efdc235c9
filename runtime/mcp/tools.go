package mcp

// addTools registers all that the options allow.
func (s *Server) addTools() {
	addOn(s, tool{name: "run_command", title: "Run a command", effect: changes,
		text: "Runs a shell command in the sandbox and returns what it prints, stdout and stderr in order, and its exit code. Output over 30000 bytes is cut in the middle and can be read with job_output. A long-running one, such as a server, is best run in the background."}, s.runCommand)
	if !s.opts.ReadOnly { // there are no jobs then
		add(s, tool{name: "job_output", title: "Read a job's output", effect: reads,
			text: "Returns what a command has printed, from a byte offset on, at most 30000 bytes, and whether it still runs."}, s.jobOutput)
	}
	add(s, tool{name: "job_stop", title: "Stop a job", effect: changes,
		text: "Ends a running command and all that it has started."}, s.jobStop)

	addOn(s, tool{name: "read_file", title: "Read a file", effect: reads,
		text: "Returns lines of a text file, 2000 lines and 50000 bytes at most unless asked otherwise; go on with offset. Of a binary file it tells only that it is one."}, s.readFile)
	addOn(s, tool{name: "write_file", title: "Write a file", effect: changes,
		text: "Gives a file that content, all or nothing, and makes the directories to it. What was in it is replaced; its mode and owner stay. At most 10 MiB."}, s.writeFile)
	addOn(s, tool{name: "edit_file", title: "Edit a file", effect: changes,
		text: "Replaces a text in a file by another, all or nothing. The old text must be exact and be there once, unless replace_all is set."}, s.editFile)
	addOn(s, tool{name: "list_files", title: "List files", effect: reads,
		text: "Lists what is in a directory, names that begin with a dot included, 1000 at most."}, s.listFiles)
	addOn(s, tool{name: "glob", title: "Find files by name", effect: reads,
		text: "Finds files and directories whose path matches a pattern. An absolute pattern, or one that begins with .., replaces path as the place to begin. Returns 1000 paths at most; looks at no more than 100000 entries, 64 directories deep, for 10 seconds."}, s.glob)
	addOn(s, tool{name: "grep", title: "Search in files", effect: reads,
		text: "Finds the lines of files that match a regular expression, as path:line:text. Binary files are passed over. Bounded as glob is."}, s.grep)

	addOn(s, tool{name: "checkpoint", title: "Take a checkpoint", effect: adds,
		text: "Records the files and processes of the sandbox as they are now, so that restore can put them back exactly. Background jobs of run_command are not part of it."}, s.checkpoint)
	if !s.opts.NoRestore {
		addOn(s, tool{name: "restore", title: "Restore a checkpoint", effect: changes,
			text: "Puts the sandbox's files and processes back exactly as they were at a checkpoint. Files made since are gone, running commands end. It can be undone."}, s.restore)
		addOn(s, tool{name: "undo", title: "Go back by steps", effect: changes,
			text: "Puts the sandbox's files and processes back by one step, or several: to its last checkpoint if files have changed since, else to the one before it. redo goes forward again."}, s.undo)
		addOn(s, tool{name: "redo", title: "Go forward by steps", effect: changes,
			text: "Takes undo back by one step, or several, until there is a new checkpoint."}, s.redo)
	}
	addOn(s, tool{name: "diff", title: "Show changes", effect: reads,
		text: "Tells which files changed between two checkpoints, or since one: A added, M modified, D deleted, R renamed, T of another type."}, s.diff)
	addOn(s, tool{name: "log", title: "List checkpoints", effect: reads,
		text: "Lists the sandbox's checkpoints, newest first; * marks where it is."}, s.history)
	addOn(s, tool{name: "fork", title: "Fork the sandbox", effect: adds,
		text: "Starts new sandboxes that go on from a checkpoint, or from now; the origin is untouched. Each can then be named as sandbox in other calls. They are removed when the session ends, unless your user keeps them."}, s.fork)

	if s.opts.Create != nil {
		add(s, tool{name: "create_sandbox", title: "Make a sandbox", effect: adds,
			text: "Makes and starts a sandbox and tells its name and working directory. It is removed when the session ends, unless your user keeps it."}, s.createSandbox)
	}
	add(s, tool{name: "list_sandboxes", title: "List sandboxes", effect: reads,
		text: "Lists the sandboxes of this session."}, s.listSandboxes)
	addOn(s, tool{name: "remove_sandbox", title: "Remove a sandbox", effect: destroys,
		text: "Removes a sandbox that was made or forked in this session, with its checkpoints."}, s.removeSandbox)
}
