package apply

import (
	"testing"

	"github.com/agentbox/agentbox/overlay"
)

func TestGitReason(t *testing.T) {
	const file, dir, link = overlay.TypeFile, overlay.TypeDir, overlay.TypeSymlink
	for _, c := range []struct {
		path     string
		old, new overlay.Type
		refused  bool
	}{
		{"/r/.git/hooks/pre-commit", "", file, true},
		{"/r/.git/hooks/deep/er", "", file, true},
		{"/r/.git/hooks", dir, link, true},
		{"/r/.git/config", file, file, true},
		{"/r/.git/config", file, "", true},
		{"/r/.git/config.worktree", "", file, true},
		{"/r/.git/info/attributes", "", file, true},
		{"/r/.git/commondir", "", file, true},
		{"/r/.GIT/config", file, file, true},
		{"/r/.git/modules/sub/hooks/pre-push", "", file, true},
		{"/r/.git/modules/a/b/config", "", file, true},
		{"/r/.git/modules/a/modules/b/config", "", file, true},
		{"/r/.git/worktrees/w/config.worktree", "", file, true},
		{"/r/.git/worktrees/w/commondir", "", file, true},
		{"/r/vendor/x/.git/config", "", file, true},
		{"/r/.git/rebase-merge/git-rebase-todo", "", file, true},
		{"/r/.git", dir, link, true},
		{"/r/.git", link, dir, true},
		{"/r/.git", "", file, true},
		{"/r/.git", file, file, true},
		{"/r/sub/.git", "", file, true},

		{"/r/.git", "", dir, false},
		{"/r/.git", dir, dir, false},
		{"/r/.git/HEAD", file, file, false},
		{"/r/.git/index", file, file, false},
		{"/r/.git/refs/heads/hooks/mine", "", file, false},
		{"/r/.git/refs/heads/config", "", file, false},
		{"/r/.git/objects/ab/cdef", "", file, false},
		{"/r/.git/info/exclude", file, file, false},
		{"/r/config", file, file, false},
		{"/r/hooks/pre-commit", "", file, false},
		{"/r/.gitattributes", file, file, false},
		{"/r/.github/config", file, file, false},
	} {
		if why := gitReason(c.path, c.old, c.new); (why != "") != c.refused {
			t.Errorf("%s from %q to %q: %q", c.path, c.old, c.new, why)
		}
	}
}
