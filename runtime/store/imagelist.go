package store

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/overlay"
	"github.com/agentbox/agentbox/runtime/store/pack"
)

// A manifest names the process images, and their chunks, itself if that takes at most
// maxNamed bytes. A longer list is JSON lines, one for each image in the order of the
// names, that are stored in chunks as a list of files is.
var maxNamed = 1 << 10

// How lists of process images are cut. Changing these makes all lists new to all stores.
const (
	minImageLines = 1 << 10
	avgImageLines = 4 << 10
	maxImageLines = 64 << 10
)

// maxImageList bounds the bytes of a list of process images, which is in memory as a whole.
const maxImageList = 64 << 20

// putImageList stores the list of the process images. Nil: it is short, and the
// manifest names them.
func (d *Draft) putImageList(ctx context.Context, list []Image) (*Tree, error) {
	var lines bytes.Buffer
	t := &Tree{}
	for i := range list {
		line, err := list[i].line()
		if err != nil {
			return nil, err
		}
		t.Entries++
		t.Data += list[i].Bytes
		if _, _ = lines.Write(line); lines.Len() > maxImageList { // never fails
			return nil, fmt.Errorf("a list of process images has more than %d bytes: %w",
				maxImageList, fault.ErrUnsupported)
		}
	}
	if lines.Len() <= maxNamed {
		return nil, nil
	}
	t.Bytes, t.Digest = int64(lines.Len()), digestOf(lines.Bytes())
	// Better a checkpoint that fails than one that cannot be read back.
	if _, err := readImageList(t, bytes.NewReader(lines.Bytes())); err != nil {
		return nil, err
	}
	var chunks []overlay.Chunk
	begin, at := 0, 0
	for all := lines.Bytes(); at < len(all); {
		word := all[at : at+wordLen(all[at:])]
		at += len(word)
		n := at - begin
		if at < len(all) && n < maxImageLines && (n < minImageLines || !cutsAfter(word, avgImageLines-minImageLines)) {
			continue
		}
		id, err := d.addNeeded(ctx, all[begin:at])
		if err != nil {
			return nil, err
		}
		chunks, begin = append(chunks, overlay.Chunk{Digest: id.String(), Len: int64(n)}), at
	}
	var err error
	t.Chunks, t.Depth, err = d.putList(ctx, chunks)
	return t, err
}

// wordLen returns where a list of process images can be cut: behind a line, and behind a chunk in it
// that another one follows.
func wordLen(lines []byte) int {
	for i, c := range lines {
		if c == '\n' || c == ',' && i > 0 && lines[i-1] == ']' {
			return i + 1
		}
	}
	return len(lines)
}

// line is the image as a list has it.
func (im *Image) line() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(im)
	return b.Bytes(), err
}

// readImageList parses a list of process images, of which t is said. Each image
// has one form, as in a manifest.
func readImageList(t *Tree, lines io.Reader) ([]Image, error) {
	bad := func(format string, args ...any) ([]Image, error) {
		return nil, fmt.Errorf("%s: %w: "+format, append([]any{imageListName, fault.ErrCorrupt}, args...)...)
	}
	var list []Image
	var data int64
	last := ""
	for r := bufio.NewReaderSize(lines, 64<<10); ; {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) && len(line) == 0 {
			break
		}
		if errors.Is(err, io.EOF) {
			return bad("it ends within a line")
		}
		if err != nil {
			return nil, err
		}
		var im Image
		if err := json.Unmarshal(line, &im); err != nil {
			return bad("image %d: %v", len(list), err)
		}
		if err := im.checkAfter(last); err != nil {
			return bad("%v", err) // not the caller's invalid argument
		}
		again, err := im.line()
		if err != nil {
			return nil, err
		}
		if !bytes.Equal(again, line) {
			return bad("image %s is not in canonical form", im.Name)
		}
		if int64(len(list)) == t.Entries || im.Bytes > t.Data-data {
			return bad("more than %d images with %d bytes", t.Entries, t.Data)
		}
		list, last, data = append(list, im), im.Name, data+im.Bytes
	}
	if int64(len(list)) != t.Entries || data != t.Data {
		return bad("%d images with %d bytes, %d and %d expected", len(list), data, t.Entries, t.Data)
	}
	return list, nil
}

// ImageList streams the list of the process images, JSON lines, like Tree. It returns ErrNotFound if
// there is no list, because the manifest names them.
func (r *Reader) ImageList(ctx context.Context) (io.ReadCloser, error) {
	p := r.manifest.Processes
	if p == nil || p.Listed == nil {
		return nil, fmt.Errorf("a list of process images: %w", fault.ErrNotFound)
	}
	list, err := r.listed(ctx)
	if err != nil {
		return nil, err
	}
	return r.imageLines(ctx, p.Listed, list.chunks.lines)
}

func (r *Reader) imageLines(ctx context.Context, t *Tree, lines []overlay.Chunk) (*proven, error) {
	segs, err := segments(lines)
	if err != nil {
		return nil, err
	}
	return newProven(ctx, r.chunks, imageListName, segs, true, t.Digest, t.Bytes), nil
}

const imageListName = "list of process images"

// imageList is a Reader's list of process images.
type imageList struct {
	images []Image
	chunks treeList
}

// Images are the process images, sorted by name; none of a checkpoint of files only.
func (r *Reader) Images(ctx context.Context) ([]Image, error) {
	list, err := r.listed(ctx)
	return list.images, err
}

// listed reads the list of process images, once.
func (r *Reader) listed(ctx context.Context) (imageList, error) {
	p := r.manifest.Processes
	if p == nil {
		return imageList{}, nil
	}
	if p.Listed == nil {
		return imageList{images: p.Images}, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.images != nil {
		return *r.images, nil
	}
	l, err := r.readListed(ctx, p.Listed)
	if err != nil {
		return imageList{}, err
	}
	r.images = &l
	return l, nil
}

func (r *Reader) readListed(ctx context.Context, t *Tree) (l imageList, err error) {
	if l.chunks, err = readList(t, func(id pack.ID) ([]byte, error) { return r.chunks.read(ctx, id) }); err != nil {
		return imageList{}, fmt.Errorf("%s: %w", imageListName, err)
	}
	s, err := r.imageLines(ctx, t, l.chunks.lines)
	if err != nil {
		return imageList{}, err
	}
	l.images, err = readImageList(t, s)
	// An error of the stream explains what the parser stumbled over.
	if found := s.Close(); found != nil {
		err = found
	}
	if err != nil {
		return imageList{}, err
	}
	return l, nil
}

// needsOfImageList adds the chunks of the list of process images, and returns the images.
func (r *Reader) needsOfImageList(ctx context.Context, set *idSet) ([]Image, error) {
	l, err := r.listed(ctx)
	if err != nil {
		return nil, err
	}
	return l.images, errors.Join(addChunks(set, l.chunks.lists), addChunks(set, l.chunks.lines))
}
