# onnxruntime_headers: an interface target for the folder that contains ONNX Runtime's C header.
#
# The header is searched in this order: the folder ONNXRUNTIME_INCLUDE_DIR (a CMake variable, else from the
# environment); the system's include folders, which have it if libonnxruntime-dev or a similar package is installed;
# NNORM_DOWNLOAD_CACHE (likewise; by default the build folder), into which scripts/fetch_onnxruntime_headers.py
# downloads it.

set(NNORM_MINIMUM_API 18) # the oldest ONNX Runtime that the library supports is 1.18

foreach(name ONNXRUNTIME_INCLUDE_DIR NNORM_DOWNLOAD_CACHE)
  if(NOT DEFINED ${name} AND NOT "$ENV{${name}}" STREQUAL "")
    set(${name} "$ENV{${name}}")
  endif()
endforeach()

set(NNORM_HEADER_REMEDIES
  "Give the folder of onnxruntime_c_api.h in ONNXRUNTIME_INCLUDE_DIR (environment or CMake variable; ONNX Runtime 1.\
${NNORM_MINIMUM_API} or newer), install the system's headers ('apt install libonnxruntime-dev' on Debian 13 and later), \
or install without the kernels: NNORM_EXPORT_BUILD_LIBRARY=0.")

# Sets ${result} to the API version of the header in ${directory}. A folder without the header gives 0.
function(nnorm_header_api directory result)
  set(api 0)
  if(EXISTS "${directory}/onnxruntime_c_api.h")
    file(STRINGS "${directory}/onnxruntime_c_api.h" line REGEX "^#define ORT_API_VERSION [0-9]+" LIMIT_COUNT 1)
    string(REGEX MATCH "[0-9]+" api "${line}")
    if(NOT api)
      set(api 0)
    endif()
  endif()
  set(${result} ${api} PARENT_SCOPE)
endfunction()

function(nnorm_find_headers result)
  # 1. The user named it: use this folder or fail. A fallback would build with a header that the user did not choose.
  if(NOT "${ONNXRUNTIME_INCLUDE_DIR}" STREQUAL "")
    if(NOT EXISTS "${ONNXRUNTIME_INCLUDE_DIR}/onnxruntime_c_api.h")
      message(FATAL_ERROR
        "nnorm_export: ONNXRUNTIME_INCLUDE_DIR is '${ONNXRUNTIME_INCLUDE_DIR}', which does not contain "
        "onnxruntime_c_api.h. Set it to the folder that contains this file, or unset it to have the header found or fetched.")
    endif()
    nnorm_header_api("${ONNXRUNTIME_INCLUDE_DIR}" api)
    if(api LESS NNORM_MINIMUM_API)
      message(FATAL_ERROR
        "nnorm_export: ONNXRUNTIME_INCLUDE_DIR is '${ONNXRUNTIME_INCLUDE_DIR}', whose onnxruntime_c_api.h has "
        "ORT_API_VERSION ${api}; ${NNORM_MINIMUM_API} or newer is needed. Name a newer header, or unset the variable.")
    endif()
    set(${result} "${ONNXRUNTIME_INCLUDE_DIR}" PARENT_SCOPE)
    return()
  endif()

  # 2. The system's. It is searched each time, because it may have been installed since the last configuration.
  find_path(directory onnxruntime_c_api.h PATH_SUFFIXES onnxruntime onnxruntime/core/session NO_CACHE)
  if(directory)
    nnorm_header_api("${directory}" api)
    if(NOT api LESS NNORM_MINIMUM_API)
      set(${result} "${directory}" PARENT_SCOPE)
      return()
    endif()
    set(tried "\n  - ${directory}: ORT_API_VERSION ${api} is too old, ${NNORM_MINIMUM_API} is needed")
  else()
    set(tried "\n  - the system's include folders: none of them has onnxruntime_c_api.h")
  endif()

  # 3. Fetched by an earlier build, or now.
  if(NOT "${NNORM_DOWNLOAD_CACHE}" STREQUAL "")
    get_filename_component(directory "${NNORM_DOWNLOAD_CACHE}/onnxruntime-headers" ABSOLUTE)
  else()
    set(directory "${CMAKE_BINARY_DIR}/onnxruntime-headers")
  endif()
  nnorm_header_api("${directory}" api)
  if(api LESS NNORM_MINIMUM_API)
    find_package(Python3 3.10 COMPONENTS Interpreter)
    if(Python3_EXECUTABLE)
      message(STATUS "ONNX Runtime: fetching its C header")
      execute_process(
        COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/scripts/fetch_onnxruntime_headers.py"
                "${directory}"
        RESULT_VARIABLE failed ERROR_VARIABLE output)
      if(failed)
        string(STRIP "${output}" output)
        string(REPLACE "\n" "\n    " output "${output}")
        string(APPEND tried "\n  - scripts/fetch_onnxruntime_headers.py:\n    ${output}")
      endif()
    else()
      string(APPEND tried "\n  - scripts/fetch_onnxruntime_headers.py: Python 3.10 or newer was not found to run it")
    endif()
    nnorm_header_api("${directory}" api)
  endif()
  if(api LESS NNORM_MINIMUM_API)
    message(FATAL_ERROR
      "nnorm_export: the C header of ONNX Runtime (onnxruntime_c_api.h) was not found. Tried:${tried}\n"
      "${NNORM_HEADER_REMEDIES}")
  endif()
  set(${result} "${directory}" PARENT_SCOPE)
endfunction()

nnorm_find_headers(NNORM_ONNXRUNTIME_HEADERS)
nnorm_header_api("${NNORM_ONNXRUNTIME_HEADERS}" api)
message(STATUS "ONNX Runtime: headers of API ${api} in ${NNORM_ONNXRUNTIME_HEADERS}")
add_library(onnxruntime_headers INTERFACE)
target_include_directories(onnxruntime_headers SYSTEM INTERFACE "${NNORM_ONNXRUNTIME_HEADERS}")
if(WIN32 AND NOT MSVC) # an annotation in the header, for Microsoft's compiler, that other ones' headers do not define
  target_compile_options(onnxruntime_headers INTERFACE "-D_Return_type_success_(condition)=")
endif()
