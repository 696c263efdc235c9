package criu

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"pgregory.net/rapid"

	"github.com/agentbox/agentbox/internal/fault"
)

// span is an entry of a synthetic page map: pages are numbered, each is full of
// the bytes of a number.
type span struct {
	page, n  uint64
	inParent bool
	lazy     bool // in no image
}

// style is how a version of CRIU writes entries.
type style struct {
	long    bool // CRIU 4.2
	old     bool // without flags
	unknown bool // with a field of the future
}

func (s style) entry(e span) []byte {
	var b []byte
	field := func(num protowire.Number, v uint64) {
		b = protowire.AppendVarint(protowire.AppendTag(b, num, protowire.VarintType), v)
	}
	field(1, e.page*pageSize)
	if s.long {
		field(2, 0)
	} else {
		field(2, e.n)
	}
	switch {
	case s.old && e.inParent:
		field(3, 1)
	case s.old:
	case e.inParent:
		field(4, 1)
	case e.lazy:
		field(4, 2)
	default:
		field(4, 4|2)
	}
	if s.long {
		field(5, e.n)
	}
	if s.unknown {
		b = protowire.AppendBytes(protowire.AppendTag(b, 9, protowire.BytesType), []byte("new"))
	}
	return b
}

// writePages makes a page map and its page image.
func writePages(t fatal, dir, name string, id uint32, s style, spans []span, fill func(page uint64) uint64) {
	file := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magicPagemap)
	add := func(entry []byte) {
		file = append(binary.LittleEndian.AppendUint32(file, uint32(len(entry))), entry...)
	}
	add(protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), uint64(id)))
	var pages []byte
	for _, e := range spans {
		add(s.entry(e))
		for i := range e.n {
			if !e.inParent && !e.lazy {
				pages = append(pages, bytes.Repeat(binary.LittleEndian.AppendUint64(nil, fill(e.page+i)), pageSize/8)...)
			}
		}
	}
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), file, 0o600),
		os.WriteFile(filepath.Join(dir, fmt.Sprintf("pages-%d.img", id)), pages, 0o600)); err != nil {
		t.Fatal(err)
	}
}

type fatal interface{ Fatal(...any) }

// contents reads what images say is on each page; lazy pages are 0.
func contents(t fatal, dir, name string) (pages map[uint64]uint64, unknown int) {
	pages = map[uint64]uint64{}
	var image []byte
	var at int
	id, err := readPages(filepath.Join(dir, name), func([]byte, pageEntry) error { return nil })
	if err == nil {
		image, err = os.ReadFile(filepath.Join(dir, fmt.Sprintf("pages-%d.img", id)))
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = readPages(filepath.Join(dir, name), func(data []byte, e pageEntry) error {
		if bytes.Contains(data, []byte("new")) {
			unknown++
		}
		for i := range e.pages {
			page := e.at/pageSize + i
			if _, twice := pages[page]; twice || e.inParent {
				return fmt.Errorf("page %d: twice %v, in parent %v", page, twice, e.inParent)
			}
			pages[page] = 0
			if !e.present {
				continue
			}
			one := image[at : at+pageSize]
			at += pageSize
			pages[page] = binary.LittleEndian.Uint64(one)
			if !bytes.Equal(one, bytes.Repeat(one[:8], pageSize/8)) {
				return fmt.Errorf("page %d is of two", page)
			}
		}
		return nil
	})
	if err == nil && at != len(image) {
		err = fmt.Errorf("%d bytes of pages, %d of them in the page map", len(image), at)
	}
	if err != nil {
		t.Fatal(err)
	}
	return pages, unknown
}

// spansOf makes entries of pages in a state, cut anywhere.
func spansOf(t *rapid.T, label string, states map[uint64]span) (list []span) {
	for _, page := range slices.Sorted(maps.Keys(states)) {
		e := states[page]
		if n := len(list); n > 0 && list[n-1].page+list[n-1].n == page && list[n-1].inParent == e.inParent && list[n-1].lazy == e.lazy && !rapid.Bool().Draw(t, label+" cut") {
			list[n-1].n++
			continue
		}
		list = append(list, span{page, 1, e.inParent, e.lazy})
	}
	return list
}

// What Flatten makes of a dump and of what was written ahead has each page as the
// one or the other has it, in whatever pieces and by whatever version.
func TestFlattenModel(t *testing.T) {
	dir := t.TempDir()
	round := 0
	rapid.Check(t, func(t *rapid.T) {
		round++
		images, ahead := filepath.Join(dir, fmt.Sprint(round), "images"), filepath.Join(dir, fmt.Sprint(round), "pre")
		defer os.RemoveAll(filepath.Dir(images))
		if err := errors.Join(os.MkdirAll(images, 0o700), os.MkdirAll(ahead, 0o700), os.Symlink("../pre", filepath.Join(images, parentLink))); err != nil {
			t.Fatal(err)
		}
		names := []string{"pagemap-1.img", "pagemap-77.img", "pagemap-shmem-5.img"}
		model := map[string]map[uint64]uint64{}
		var taken int64
		lost, future := false, map[string]int{}
		for i, name := range names {
			draw := func(what string, n uint64) uint64 { return rapid.Uint64Range(0, n-1).Draw(t, name+" "+what) }
			styles := []style{{long: true}, {}, {old: true}, {long: true, unknown: true}}
			before, now := map[uint64]span{}, map[uint64]span{}
			model[name] = map[uint64]uint64{}
			base := draw("base", 3) * 0x7f0000
			for range draw("pages", 40) {
				page := base + draw("page", 60)
				before[page] = span{}
				switch draw("fate", 4) {
				case 0: // gone since
				case 1:
					now[page] = span{}
				case 2:
					now[page] = span{inParent: true}
				case 3:
					if delete(before, page); draw("missing", 40) == 0 {
						now[page] = span{inParent: true}
					} else {
						delete(now, page)
					}
				}
			}
			s := styles[draw("style", 4)]
			for page := range draw("lazy", 3) {
				if !s.old {
					now[base+100+page] = span{lazy: true}
				}
			}
			for page, e := range now {
				_, there := before[page]
				switch {
				case e.lazy:
					model[name][page] = 0
				case e.inParent:
					lost = lost || !there
					model[name][page] = page<<8 | 1
					taken += pageSize
				default:
					model[name][page] = page<<8 | 2
				}
			}
			list := spansOf(t, "dump", now)
			if s.unknown {
				future[name] = len(list)
			}
			writePages(t, images, name, uint32(i+1), s, list, func(p uint64) uint64 { return p<<8 | 2 })
			writePages(t, ahead, name, uint32(7-i), styles[draw("style ahead", 4)], spansOf(t, "ahead", before), func(p uint64) uint64 { return p<<8 | 1 })
		}
		if err := CheckImages(images); err != nil {
			t.Fatal(err)
		}
		got, err := (&Ahead{Dir: ahead}).Flatten(context.Background(), images)
		if lost {
			if !errors.Is(err, fault.ErrCorrupt) {
				t.Fatalf("with a page that is nowhere: %v", err)
			}
			return
		}
		if err != nil || got != taken {
			t.Fatalf("%d bytes, want %d: %v", got, taken, err)
		}
		for name, want := range model {
			have, unknown := contents(t, images, name)
			if !reflect.DeepEqual(have, want) {
				t.Fatalf("%s: %v, want %v", name, have, want)
			}
			if unknown < future[name] {
				t.Fatalf("%s: %d of %d entries have kept what is not known", name, unknown, future[name])
			}
		}
		left, err := filepath.Glob(filepath.Join(images, "*"))
		if err != nil || len(left) != 2*len(names) {
			t.Fatal(left, err)
		}
		if _, err := os.Stat(ahead); !errors.Is(err, os.ErrNotExist) {
			t.Fatal("what was written ahead is still there:", err)
		}
	})
}

func TestFlattenRefuses(t *testing.T) {
	one := func(page uint64) uint64 { return page }
	whole := []span{{page: 1, n: 4}}
	part := []span{{page: 1, n: 2, inParent: true}, {page: 3, n: 1}}
	for name, make := range map[string]func(images, ahead string){
		"no page map ahead": func(images, _ string) { writePages(t, images, "pagemap-1.img", 1, style{}, part, one) },
		"short pages ahead": func(images, ahead string) {
			writePages(t, images, "pagemap-1.img", 1, style{}, part, one)
			writePages(t, ahead, "pagemap-1.img", 1, style{}, whole, one)
			if err := os.Truncate(filepath.Join(ahead, "pages-1.img"), pageSize); err != nil {
				t.Fatal(err)
			}
		},
		"no pages ahead": func(images, ahead string) {
			writePages(t, images, "pagemap-1.img", 1, style{}, part, one)
			writePages(t, ahead, "pagemap-1.img", 1, style{}, whole, one)
			if err := os.Remove(filepath.Join(ahead, "pages-1.img")); err != nil {
				t.Fatal(err)
			}
		},
		"pages of a grandparent": func(images, ahead string) {
			writePages(t, images, "pagemap-1.img", 1, style{}, part, one)
			writePages(t, ahead, "pagemap-1.img", 1, style{}, []span{{page: 1, n: 4, inParent: true}}, one)
		},
		"no order": func(images, ahead string) {
			writePages(t, images, "pagemap-1.img", 1, style{}, []span{part[1], part[0]}, one)
			writePages(t, ahead, "pagemap-1.img", 1, style{}, whole, one)
		},
		"no order ahead": func(images, ahead string) {
			writePages(t, images, "pagemap-1.img", 1, style{}, part, one)
			writePages(t, ahead, "pagemap-1.img", 1, style{}, []span{{page: 9, n: 1}, {page: 1, n: 4}}, one)
		},
		"two of the same pages": func(images, ahead string) {
			for _, n := range []string{"pagemap-1.img", "pagemap-2.img"} {
				writePages(t, images, n, 1, style{}, part, one)
				writePages(t, ahead, n, 1, style{}, whole, one)
			}
		},
	} {
		images, ahead := filepath.Join(t.TempDir(), "images"), filepath.Join(t.TempDir(), "pre")
		make(images, ahead)
		if _, err := (&Ahead{Dir: ahead}).Flatten(context.Background(), images); !errors.Is(err, fault.ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
		if left, err := filepath.Glob(filepath.Join(images, "*"+newSuffix)); err != nil || len(left) > 0 {
			t.Errorf("%s leaves %v, %v", name, left, err)
		}
	}
	// Nothing that is not whole passes for an ordinary dump.
	images := t.TempDir()
	writePages(t, images, "pagemap-1.img", 1, style{}, part, one)
	if err := CheckImages(images); !errors.Is(err, fault.ErrCorrupt) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := (&Ahead{Dir: t.TempDir()}).Flatten(ctx, images); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Whatever two page maps say, the result is an ordinary dump or an error.
func FuzzFlatten(f *testing.F) {
	head := []byte{2, 0, 0, 0, 8, 1}
	entry := func(s style, e span) []byte {
		b := s.entry(e)
		return append(binary.LittleEndian.AppendUint32(nil, uint32(len(b))), b...)
	}
	f.Add(append(slices.Clone(head), entry(style{}, span{page: 1, n: 2, inParent: true})...), append(slices.Clone(head), entry(style{long: true}, span{page: 0, n: 3})...))
	f.Add(append(slices.Clone(head), entry(style{long: true}, span{page: 1, n: 1 << 37, inParent: true})...), append(slices.Clone(head), entry(style{old: true}, span{page: 1, n: 1 << 30})...))
	f.Fuzz(func(t *testing.T, dump, parent []byte) {
		images, ahead := filepath.Join(t.TempDir(), "images"), filepath.Join(t.TempDir(), "pre")
		for dir, data := range map[string][]byte{images: dump, ahead: parent} {
			file := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, magicCommon), magicPagemap)
			if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "pagemap-1.img"), append(file, data...), 0o600),
				os.WriteFile(filepath.Join(dir, "pages-1.img"), make([]byte, 4*pageSize), 0o600)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := (&Ahead{Dir: ahead}).Flatten(context.Background(), images); err != nil {
			return
		}
		if err := CheckImages(images); err != nil {
			t.Fatal(err)
		}
	})
}
