// Package changes converts a change between two trees of files to the form of the API.
package changes

import (
	"encoding/base64"
	"fmt"
	"path"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime"
)

// Of converts one change to the form of the API.
func Of(c overlay.Change) runtime.Change {
	out := runtime.Change{Change: string(c.Kind), What: c.What, Old: fileState(c.Old), New: fileState(c.New)}
	out.Path, out.PathB64 = nameView(c.Path)
	if c.Kind == overlay.Renamed {
		out.From, out.FromB64 = nameView(c.From)
	}
	if c.New != nil {
		out.Type = string(c.New.Type)
	} else {
		out.Type = string(c.Old.Type)
	}
	return out
}

// nameView returns a path as a user of the sandbox sees it, and in base64 if JSON cannot
// represent it.
func nameView(p string) (text, b64 string) {
	text = path.Join("/", p)
	if !utf8.ValidString(text) {
		b64 = base64.StdEncoding.EncodeToString([]byte(text))
	}
	return text, b64
}

// Entry converts what is at one path.
func Entry(e *overlay.Entry) runtime.FileEntry {
	out := runtime.FileEntry{FileState: *fileState(e)}
	out.Path, out.PathB64 = nameView(e.Path)
	return out
}

func fileState(e *overlay.Entry) *runtime.FileState {
	if e == nil {
		return nil
	}
	f := &runtime.FileState{
		Type: string(e.Type), Mode: Octal(e.Mode), UID: e.UID, GID: e.GID, Size: e.Size, Target: e.Link,
	}
	if e.Type == overlay.TypeChar || e.Type == overlay.TypeBlock {
		f.Device = fmt.Sprintf("%d:%d", e.Major, e.Minor)
	}
	if t := time.Unix(e.Mtime.Sec, e.Mtime.Nsec).UTC(); t.Year() >= 1 && t.Year() <= 9999 {
		f.Mtime = t.Format(time.RFC3339Nano)
	} else {
		f.Mtime = strconv.FormatInt(e.Mtime.Sec, 10)
	}
	return f
}

// Octal returns a mode as the API has it.
func Octal(mode uint32) string { return fmt.Sprintf("%04o", mode) }
