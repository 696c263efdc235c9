// Command steady writes one growing number to its memory, to a file and to a
// mapped file, and ends with 1 as soon as the three are not the same: that is
// what a checkpoint whose parts are not of one instant does to it.
package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"
)

func main() {
	file, mapped := open(os.Args[1]+"/file"), open(os.Args[1]+"/mapped")
	page, err := syscall.Mmap(int(mapped.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	check(err)
	var n uint64
	var buf, back [8]byte
	for {
		n++
		binary.LittleEndian.PutUint64(buf[:], n)
		_, err := file.WriteAt(buf[:], 0)
		check(err)
		copy(page, buf[:])
		_, err = file.ReadAt(back[:], 0)
		check(err)
		inFile, inMap := binary.LittleEndian.Uint64(back[:]), binary.LittleEndian.Uint64(page)
		if inFile != n || inMap != n {
			fmt.Printf("memory has %d, the file %d, the mapped file %d\n", n, inFile, inMap)
			os.Exit(1)
		}
	}
}

func open(path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	check(err)
	check(f.Truncate(8))
	return f
}

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(2)
	}
}
