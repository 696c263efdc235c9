package apply

import (
	"slices"
	"strings"

	"github.com/agentbox/agentbox/overlay"
)

// gitReason says why a change at a path of the host would have git run programs there; empty: it
// would not. Of the types of what is there and what comes, empty ones are nothing.
func gitReason(p string, old, new overlay.Type) string {
	names := strings.Split(strings.Trim(p, "/"), "/")
	at := slices.IndexFunc(names, isGitDir)
	if at < 0 {
		return ""
	}
	last := len(names) - 1
	if isGitDir(names[last]) {
		link := func(t overlay.Type) bool { return t != "" && t != overlay.TypeDir }
		if link(old) || link(new) {
			return "git would take its configuration and hooks from where it leads"
		}
	}
	for ; at < last; at++ {
		if isGitDir(names[at]) {
			if why := gitFile(names[at+1:]); why != "" {
				return why
			}
		}
	}
	return ""
}

func isGitDir(name string) bool { return strings.EqualFold(name, ".git") }

// gitFile is gitReason for a path in a .git directory. That of a submodule is in modules/NAME, where
// NAME can have slashes, and that of a further worktree in worktrees/NAME.
func gitFile(names []string) string {
	for first := true; len(names) > 0; first = false {
		switch file := strings.Join(names, "/"); {
		case names[0] == "hooks":
			return "git runs hooks"
		case file == "config", file == "config.worktree":
			return "the configuration of git can name programs that git runs"
		case file == "info/attributes":
			return "it can have git run filters"
		case names[0] == "rebase-merge":
			return "a rebase that goes on runs commands from it"
		case file == "commondir":
			return "git would take its configuration and hooks from where it leads"
		}
		if first && names[0] != "modules" && names[0] != "worktrees" {
			return ""
		}
		names = names[1:]
	}
	return ""
}
